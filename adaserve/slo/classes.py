"""Service-level objectives of a request: values, classes, and where they come from.

A request may name its objectives in four places. The first that speaks wins, for TPOT and TTFT
separately::

    body   custom_params {slo_tpot_ms, slo_ttft_ms}, or nvext.router {itl_target, ttft_target}
    header x-slo-tpot-ms, x-slo-ttft-ms (also spelled x-llm-d-slo-...)
    class  custom_params {slo_class} or header x-slo-class
    default  the server's default class, else no SLO

Milliseconds outside, seconds inside; ``math.inf`` means "no objective". The server answers a bad
value with 400 and the text of :class:`SLOError`, so each message names the value and the remedy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TPOT_RANGE_MS = (0.1, 60_000.0)
TTFT_RANGE_MS = (1.0, 3_600_000.0)
X_BASELINE_RANGE = (0.05, 1_000.0)

HEADER_CLASS = "x-slo-class"
HEADER_TPOT = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
HEADER_TTFT = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
BODY_KEYS = ("slo_class", "slo_tpot_ms", "slo_ttft_ms")

DEFAULT_CLASS = "default"
"""Label of requests that ask for nothing."""
CUSTOM_CLASS = "custom"
"""Label of requests that give milliseconds but name no class: metrics labels stay bounded."""
MAX_CLASSES = 32

_NUMBER = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_CLASS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}", re.ASCII)


class SLOError(ValueError):
    """A bad objective; the text says which value was bad and what is accepted."""


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request, in seconds; inf = none."""

    tpot_s: float = math.inf
    ttft_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.tpot_s > 0 and self.ttft_s > 0):  # also refuses NaN
            raise SLOError(f"an SLO must be positive, not tpot_s={self.tpot_s}, ttft_s={self.ttft_s}")


@dataclass(frozen=True, slots=True)
class SLOClass:
    """A named kind of request. TPOT is absolute (``tpot_ms``) or ``x_baseline`` times the latency
    per token that the unloaded server was measured to have; with neither there is no TPOT SLO."""

    name: str
    tpot_ms: float | None = None
    x_baseline: float | None = None
    ttft_ms: float | None = None
    target: float = 0.9  # share of requests that should attain, for dashboards and alerts; in (0, 1)

    def __post_init__(self) -> None:
        where = f"class {self.name!r}: "
        if not isinstance(self.name, str) or not _CLASS_NAME.fullmatch(self.name):
            raise SLOError(
                f"{self.name!r} is not a class name: it must start with a letter and hold at most 32 "
                "letters, digits, '_', '-' or '.'"
            )
        if self.tpot_ms is not None and self.x_baseline is not None:
            raise SLOError(f"{where}give tpot_ms or x_baseline, not both")
        _check_number(self.tpot_ms, TPOT_RANGE_MS, f"{where}tpot_ms", "ms")
        _check_number(self.x_baseline, X_BASELINE_RANGE, f"{where}x_baseline", "times the baseline")
        _check_number(self.ttft_ms, TTFT_RANGE_MS, f"{where}ttft_ms", "ms")
        target = _check_number(self.target, (0.0, 1.0), f"{where}target", "(a share of requests)")
        if target is None or target in (0.0, 1.0):
            raise SLOError(f"{where}target must lie between 0 and 1, both excluded, for example 0.95")

    @property
    def needs_baseline(self) -> bool:
        return self.x_baseline is not None

    def slo(self, baseline_s: float | None) -> SLO:
        """The objectives in seconds. Raises SLOError when they need a baseline that is unknown."""
        ttft_s = math.inf if self.ttft_ms is None else self.ttft_ms / 1e3
        if self.x_baseline is None:
            return SLO(math.inf if self.tpot_ms is None else self.tpot_ms / 1e3, ttft_s)
        if baseline_s is None or not 0 < baseline_s < math.inf:
            raise SLOError(
                f"class {self.name!r} is {self.x_baseline:g} x the baseline latency, which is not known "
                "here: measure it, or give the class an absolute tpot_ms"
            )
        return SLO(self.x_baseline * baseline_s, ttft_s)


def paper_classes() -> dict[str, SLOClass]:
    """The paper's artifact: baseline 30 ms; coding 1.2 x baseline, chat 50 ms, summarization 150 ms.
    As multiples, so that they mean the same on any host."""
    multiples = {"coding": 1.2, "chat": 50 / 30, "summarization": 150 / 30}
    return {name: SLOClass(name, x_baseline=x) for name, x in multiples.items()}


@dataclass(frozen=True)
class SLOConfig:
    """The classes that a server or a load test knows, and the class of requests that name none."""

    classes: Mapping[str, SLOClass] = field(default_factory=paper_classes)
    default_class: str | None = None

    def __post_init__(self) -> None:
        if len(self.classes) > MAX_CLASSES:
            raise SLOError(f"{len(self.classes)} classes are too many: at most {MAX_CLASSES}")
        reserved = {DEFAULT_CLASS, CUSTOM_CLASS} & set(self.classes)
        if CUSTOM_CLASS in reserved:
            raise SLOError("the class name 'custom' is reserved for requests that give milliseconds only")
        if self.default_class is not None and self.default_class not in self.classes:
            raise SLOError(f"default_class {self.default_class!r} is not one of: {self._names()}")

    @classmethod
    def load(cls, path: str | Path) -> SLOConfig:
        """Reads a YAML file; raises SLOError with the file's name and what to change.

        ::

            default_class: chat
            classes:
              coding: {x_baseline: 1.2, target: 0.95}
              chat: {tpot_ms: 50, ttft_ms: 2000}
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise SLOError(f"cannot read the SLO classes in {path}: {e}") from e
        try:
            return cls.from_mapping(yaml.safe_load(text))
        except yaml.YAMLError as e:
            raise SLOError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
        except SLOError as e:
            raise SLOError(f"{path}: {e}") from e

    @classmethod
    def from_mapping(cls, data: Any) -> SLOConfig:
        """Builds from parsed YAML or JSON of the form shown in :meth:`load`."""
        if not isinstance(data, Mapping) or not isinstance(data.get("classes"), Mapping):
            raise SLOError("expected a mapping 'classes:' of class names to {tpot_ms | x_baseline, ...}")
        unknown = set(map(str, data)) - {"classes", "default_class", "baseline_ms"}
        if unknown:
            raise SLOError(f"unknown keys {sorted(unknown)}: known are classes, default_class, baseline_ms")
        return cls({n: _class_from(n, v) for n, v in data["classes"].items()}, data.get("default_class"))

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of :meth:`from_mapping` (written into results)."""
        classes = {
            c.name: {
                k: v
                for k, v in (("tpot_ms", c.tpot_ms), ("x_baseline", c.x_baseline), ("ttft_ms", c.ttft_ms))
                if v is not None
            }
            | {"target": c.target}
            for c in self.classes.values()
        }
        return {"default_class": self.default_class, "classes": classes}

    @property
    def labels(self) -> tuple[str, ...]:
        """Every value that ``ResolvedSLO.slo_class`` can take."""
        return tuple(dict.fromkeys((*self.classes, DEFAULT_CLASS, CUSTOM_CLASS)))

    @property
    def needs_baseline(self) -> bool:
        return any(c.needs_baseline for c in self.classes.values())

    def get(self, name: Any) -> SLOClass:
        """The class of that name; 'default' and 'custom' always exist. Raises SLOError."""
        if isinstance(name, str):
            if name in self.classes:
                return self.classes[name]
            if name == DEFAULT_CLASS:
                default = self.classes.get(self.default_class or "")
                return default or SLOClass(DEFAULT_CLASS)
            if name == CUSTOM_CLASS:
                return SLOClass(CUSTOM_CLASS)
        raise SLOError(f"unknown SLO class {_show(name)}: known classes are {self._names()}")

    def target(self, label: str) -> float:
        """Attainment target of a metrics label."""
        return self.get(label).target

    def _names(self) -> str:
        return ", ".join(dict.fromkeys((*self.classes, DEFAULT_CLASS)))


@dataclass(frozen=True, slots=True)
class ResolvedSLO:
    """The objectives of one request after precedence. Seconds; inf = none."""

    slo_class: str  # one of SLOConfig.labels
    tpot_s: float
    ttft_s: float
    source: str  # where the TPOT came from: body | header | class | default

    @property
    def slo(self) -> SLO:
        return SLO(self.tpot_s, self.ttft_s)

    def to_params(self) -> dict[str, Any]:
        """JSON values for ``custom_params``; resolving them again gives the same objectives."""
        params: dict[str, Any] = {"slo_class": self.slo_class}
        if math.isfinite(self.tpot_s):
            params["slo_tpot_ms"] = self.tpot_s * 1e3
        if math.isfinite(self.ttft_s):
            params["slo_ttft_ms"] = self.ttft_s * 1e3
        return params


Headers = Mapping[str, str] | Iterable[tuple[str, str]]


def resolve(
    headers: Headers,
    custom_params: Mapping[str, Any] | None,
    config: SLOConfig,
    baseline_s: float | None,
    nvext: Mapping[str, Any] | None = None,
) -> ResolvedSLO:
    """Finds the objectives of a request.

    ``headers``: a mapping or pairs (pairs show a header that was sent twice), names in any case.
    ``custom_params``: SGLang's body field; keys that do not start with ``slo_`` are left alone.
    ``nvext``: Dynamo's body field, taken from ``custom_params["nvext"]`` when not given.
    ``baseline_s``: measured seconds per token of the unloaded server; None = unknown.
    Raises SLOError for every value that is not understood: nothing is ignored silently.
    """
    sent = _header_values(headers)
    body = _body_values(custom_params, nvext)
    name = body.slo_class if body.slo_class is not None else _header_class(sent)
    header_tpot = _header_ms(sent, HEADER_TPOT, TPOT_RANGE_MS)
    header_ttft = _header_ms(sent, HEADER_TTFT, TTFT_RANGE_MS)
    explicit = [v for v in (body.tpot_ms, header_tpot, body.ttft_ms, header_ttft) if v is not None]

    tpot_ms = body.tpot_ms if body.tpot_ms is not None else header_tpot
    ttft_ms = body.ttft_ms if body.ttft_ms is not None else header_ttft
    cls = config.get(name if name is not None else DEFAULT_CLASS)
    label = _label(name, bool(explicit), config)
    if name == CUSTOM_CLASS or tpot_ms is not None:
        # A class that is a multiple of an unknown baseline is no obstacle when it is not needed.
        cls_tpot_s = math.inf
        cls_ttft_s = math.inf if cls.ttft_ms is None else cls.ttft_ms / 1e3
    else:
        cls_tpot_s, cls_ttft_s = (s := cls.slo(baseline_s)).tpot_s, s.ttft_s
    source = "class" if name is not None else "default"
    if tpot_ms is not None:
        source = "body" if body.tpot_ms is not None else "header"
    return ResolvedSLO(
        label,
        tpot_ms / 1e3 if tpot_ms is not None else cls_tpot_s,
        ttft_ms / 1e3 if ttft_ms is not None else cls_ttft_s,
        source,
    )


def _label(name: str | None, has_explicit: bool, config: SLOConfig) -> str:
    if name == DEFAULT_CLASS or (name is None and not has_explicit):
        return config.default_class or DEFAULT_CLASS
    return CUSTOM_CLASS if name is None else name


@dataclass(frozen=True, slots=True)
class _Body:
    slo_class: str | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None


def _body_values(params: Mapping[str, Any] | None, nvext: Mapping[str, Any] | None) -> _Body:
    if params is not None and not isinstance(params, Mapping):
        raise SLOError(f"custom_params must be an object, not {_show(params)}")
    params = params or {}
    unknown = [str(k) for k in params if str(k).startswith("slo_") and k not in BODY_KEYS]
    if unknown:
        raise SLOError(f"custom_params has no {unknown[0]!r}: SLO keys are {', '.join(BODY_KEYS)}")
    router = _router(nvext if nvext is not None else params.get("nvext"))
    name = params.get("slo_class")
    if name is not None and not isinstance(name, str):
        raise SLOError(f"custom_params.slo_class must be a class name, not {_show(name)}")
    tpot = _check_number(params.get("slo_tpot_ms"), TPOT_RANGE_MS, "custom_params.slo_tpot_ms", "ms")
    ttft = _check_number(params.get("slo_ttft_ms"), TTFT_RANGE_MS, "custom_params.slo_ttft_ms", "ms")
    itl_nv = _check_number(router.get("itl_target"), TPOT_RANGE_MS, "nvext.router.itl_target", "ms")
    ttft_nv = _check_number(router.get("ttft_target"), TTFT_RANGE_MS, "nvext.router.ttft_target", "ms")
    return _Body(
        name,
        _one([("custom_params.slo_tpot_ms", tpot), ("nvext.router.itl_target", itl_nv)]),
        _one([("custom_params.slo_ttft_ms", ttft), ("nvext.router.ttft_target", ttft_nv)]),
    )


def _router(nvext: Any) -> Mapping[str, Any]:
    if nvext is None:
        return {}
    router = nvext.get("router") if isinstance(nvext, Mapping) else nvext
    if router is None:
        return {}
    if not isinstance(router, Mapping):
        raise SLOError(f"nvext.router must be an object like {{'itl_target': 50}}, not {_show(router)}")
    return router


def _header_values(headers: Headers) -> dict[str, list[str]]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    sent: dict[str, list[str]] = {}
    for name, value in pairs:
        sent.setdefault(str(name).lower(), []).append(value)
    return sent


def _header_class(sent: Mapping[str, list[str]]) -> str | None:
    names = list(dict.fromkeys(v.strip() for v in sent.get(HEADER_CLASS, [])))
    if len(names) > 1:
        raise SLOError(f"header {HEADER_CLASS} was sent twice with different names: {', '.join(names)}")
    return names[0] if names else None


def _header_ms(
    sent: Mapping[str, list[str]], names: tuple[str, ...], limits: tuple[float, float]
) -> float | None:
    values: list[tuple[str, float | None]] = []
    for name in names:
        for text in sent.get(name, []):
            if not isinstance(text, str) or not _NUMBER.fullmatch(text.strip()):
                raise SLOError(f"header {name} is {_show(text)}: {_accepted(limits, 'ms')}")
            values.append((f"header {name}", _check_number(float(text), limits, f"header {name}", "ms")))
    return _one(values)


def _one(values: list[tuple[str, float | None]]) -> float | None:
    """The one value that several spellings agree on."""
    given = [(name, v) for name, v in values if v is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise SLOError(
                f"{given[0][0]} = {given[0][1]:g} and {name} = {value:g} disagree: send one of them"
            )
    return given[0][1] if given else None


def _check_number(value: Any, limits: tuple[float, float], where: str, unit: str) -> float | None:
    """A finite number inside ``limits`` as a float, None for None."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not limits[0] <= value <= limits[1]:  # NaN fails both comparisons
        raise SLOError(f"{where} is {_show(value)}: {_accepted(limits, unit)}")
    return float(value)


def _accepted(limits: tuple[float, float], unit: str) -> str:
    return f"accepted is a number from {limits[0]:g} to {limits[1]:,.0f} {unit}".replace(",", "")


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int with thousands of digits cannot be printed
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _class_from(name: Any, data: Any) -> SLOClass:
    if data is not None and not isinstance(data, Mapping):
        raise SLOError(
            f"class {name!r}: expected {{tpot_ms | x_baseline, ttft_ms, target}}, not {_show(data)}"
        )
    data = data or {}
    known = {"tpot_ms", "x_baseline", "ttft_ms", "target"}
    unknown = set(map(str, data)) - known
    if unknown:
        raise SLOError(
            f"class {name!r}: unknown keys {sorted(unknown)}: known are {', '.join(sorted(known))}"
        )
    return SLOClass(name, **data)

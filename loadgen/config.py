"""The configuration of a load test: frozen dataclasses, read from YAML, written into results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.errors import LoadgenError, why_unreadable
from adaserve.slo.classes import TPOT_RANGE_MS, SLOClass, SLOConfig, SLOError

APIS = ("completions", "chat", "generate")
SLO_HEADERS = ("both", "ms", "class", "none")
SLO_SOURCES = ("classes", "trace")


_TOO_MUCH = 1e15  # whoever gives more has slipped, and squares of it are still finite


def _number(where: str, value: Any, *, low: float = 0.0, strict: bool = False, whole: bool = False) -> None:
    """Refuses what is no finite number from ``low`` on (above ``low`` when ``strict``)."""
    kind = int if whole else (int, float)
    good = isinstance(value, kind) and not isinstance(value, bool) and low <= value < _TOO_MUCH
    if not good or (strict and value == low):
        need = f"{'a whole number' if whole else 'a number'} {'above' if strict else 'of'} {low:g}"
        need += "" if strict else " or more"
        if isinstance(value, int | float) and value >= _TOO_MUCH:
            need = f"less than {_TOO_MUCH:g}"
        raise LoadgenError(f"{where} must be {need}, not {_shown(value)}")


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, token


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value in a message; a number of hundreds of digits helps nobody."""
    text = "a number of very many digits" if type(value) is int and abs(value) > 10**100 else repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise LoadgenError(f"{where} must be text in one line, not {value!r}")


def _flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise LoadgenError(f"{where} must be true or false, not {value!r}")


@dataclass(frozen=True)
class Length:
    """Token counts drawn per request: log-normal around ``median``, clipped to [low, high].
    ``sigma`` 0 = always ``median``."""

    median: int = 100
    sigma: float = 0.0
    low: int = 1
    high: int = 100_000

    def __post_init__(self) -> None:
        whole = all(
            isinstance(v, int) and not isinstance(v, bool) for v in (self.median, self.low, self.high)
        )
        good = whole and 1 <= self.low <= self.median <= self.high
        if not good or not _is_number(self.sigma) or not 0 <= self.sigma <= 10:
            raise LoadgenError(
                f"a length needs whole numbers 1 <= low <= median <= high and sigma from 0 to 10, not {self}"
            )


@dataclass(frozen=True)
class ClassLoad:
    """How requests of one class look. SLO keys are those of the SLO classes file."""

    name: str
    tpot_ms: float | None = None
    x_baseline: float | None = None
    ttft_ms: float | None = None
    target: float = 0.9
    share: float = 1.0  # weight in the mix
    arrivals: Arrivals | None = None  # its own arrivals instead of a share of the common ones
    prompt_tokens: Length = Length(100, 0.5, 8, 2000)
    output_tokens: Length = Length(64)
    temperature: float = 0.0
    category: str | None = None  # of the prompts; None = the class name
    turns: int = 1
    think_s: float = 1.0  # pause between turns of a session
    disconnect: float = 0.0  # share of requests that hang up half-way

    def __post_init__(self) -> None:
        self.slo_class()  # checks name and SLO
        for key in ("share", "temperature", "think_s", "disconnect"):
            _number(f"class {self.name!r}: {key}", getattr(self, key))
        if self.disconnect > 1:
            raise LoadgenError(
                f"class {self.name!r}: disconnect is a share from 0 to 1, not {self.disconnect}"
            )
        _number(f"class {self.name!r}: turns", self.turns, low=1, whole=True)
        if self.category is not None:
            _text(f"class {self.name!r}: category", self.category)

    def slo_class(self) -> SLOClass:
        try:
            return SLOClass(
                name=self.name,
                tpot_ms=self.tpot_ms,
                x_baseline=self.x_baseline,
                ttft_ms=self.ttft_ms,
                target=self.target,
            )
        except SLOError as e:
            raise LoadgenError(f"class {self.name!r}: {e}") from e


def default_classes() -> dict[str, ClassLoad]:
    """The paper's mix: 60% coding at 1.2 x baseline, chat and summarization in its proportions."""
    rows = [
        ClassLoad("coding", x_baseline=1.2, share=0.6, prompt_tokens=Length(90, 0.5, 16, 400)),
        ClassLoad("chat", x_baseline=50 / 30, share=0.2, prompt_tokens=Length(40, 0.6, 8, 200)),
        ClassLoad("summarization", x_baseline=5.0, share=0.2, prompt_tokens=Length(400, 0.4, 100, 900)),
    ]
    return {c.name: c for c in rows}


@dataclass(frozen=True)
class TraceSpec:
    """Which trace, and how it is fitted to this run."""

    path: str
    format: str = "auto"
    start_s: float = 0.0
    time_scale: float = 1.0
    target_rps: float | None = None
    sort: bool = False
    slo_from: str = "classes"  # classes: a class of this file beats the row's own SLO; trace: the reverse
    max_prompt_tokens: int | None = None  # clip, for models with a short context
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        _text("trace: path", self.path)
        _text("trace: format", self.format)
        _flag("trace: sort", self.sort)
        _number("trace: start_s", self.start_s)
        _number("trace: time_scale", self.time_scale, strict=True)
        if self.target_rps is not None:
            _number("trace: target_rps", self.target_rps, strict=True)
        for key in ("max_prompt_tokens", "max_output_tokens"):
            if getattr(self, key) is not None:
                _number(f"trace: {key}", getattr(self, key), low=1, whole=True)
        if self.slo_from not in SLO_SOURCES:
            raise LoadgenError(f"trace: slo_from is {self.slo_from!r}, known are {', '.join(SLO_SOURCES)}")


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, in what form."""

    url: str = "http://127.0.0.1:30000"
    model: str | None = None  # None = the first that the server lists
    api: str = "completions"
    slo_headers: str = "both"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0  # silence after which a request has failed
    continuous_usage: bool | None = None  # usage in every chunk (exact first-chunk sizes); None = find out
    ignore_eos: bool = False
    insecure: bool = False  # accept any TLS certificate

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise LoadgenError(f"unknown api {self.api!r}: known are {', '.join(APIS)}")
        if self.slo_headers not in SLO_HEADERS:
            raise LoadgenError(f"slo_headers is {self.slo_headers!r}: known are {', '.join(SLO_HEADERS)}")
        if not str(self.url).startswith(("http://", "https://")):
            raise LoadgenError(f"the server's URL must start with http:// or https://, not {self.url!r}")
        try:
            parts = urlsplit(self.url)
            complete = bool(parts.hostname) and parts.port != 0
            complete = complete and self.url.isascii() and self.url.isprintable() and " " not in self.url
        except ValueError:
            complete = False
        if not complete:
            raise LoadgenError(
                f"the server's URL needs a host and a port up to 65535, without blanks, not {self.url!r}"
            )
        _number("server: timeout_s", self.timeout_s, strict=True)
        if self.model is not None:
            _text("server: model", self.model)
        for key in ("ignore_eos", "insecure"):
            _flag(f"server: {key}", getattr(self, key))
        if self.continuous_usage is not None:
            _flag("server: continuous_usage", self.continuous_usage)
        if not isinstance(self.headers, Mapping):
            raise LoadgenError(f"server: headers must be names with values, not {self.headers!r}")
        for name, value in self.headers.items():
            good = isinstance(name, str) and isinstance(value, str) and _HEADER.fullmatch(name)
            if not good or not (value.isascii() and value.isprintable()):
                shown = "what was given" if _secret(str(name)) else repr(value)
                raise LoadgenError(f"server: header {name!r} must be one line of text in ASCII, not {shown}")


@dataclass(frozen=True)
class BenchConfig:
    """Everything that decides what a run sends. Written to ``config.yaml`` of the results."""

    server: Endpoint = Endpoint()
    classes: Mapping[str, ClassLoad] = field(default_factory=default_classes)
    arrivals: Arrivals = field(default_factory=Arrivals)
    trace: TraceSpec | None = None
    duration_s: float = 60.0
    max_requests: int | None = None
    warmup_s: float = 0.0
    seed: int = 0
    baseline_ms: float | None = None
    prompts: str | None = None
    chars_per_token: Mapping[str, float] = field(default_factory=dict)
    tokenizer: str | None = None  # Hugging Face folder or name, for exact prompt lengths

    def __post_init__(self) -> None:
        if not self.classes:
            raise LoadgenError("at least one class is needed")
        if sum(c.share for c in self.classes.values()) <= 0:
            raise LoadgenError("the shares of the classes add up to 0")
        _number("duration_s", self.duration_s, strict=True)
        _number("warmup_s", self.warmup_s)
        if self.warmup_s >= self.duration_s:
            raise LoadgenError(
                f"nothing is left to measure: the warm-up of {self.warmup_s:g} s is as long as the run of "
                f"{self.duration_s:g} s"
            )
        _number("seed", self.seed, whole=True)
        if self.max_requests is not None:
            _number("max_requests", self.max_requests, low=1, whole=True)
        if self.baseline_ms is not None:
            _number("baseline_ms", self.baseline_ms, strict=True)
            if self.baseline_ms > TPOT_RANGE_MS[1]:
                raise LoadgenError(
                    f"baseline_ms must be at most {TPOT_RANGE_MS[1]:g}, not {self.baseline_ms:g}"
                )
        if not isinstance(self.chars_per_token, Mapping):
            raise LoadgenError(
                f"chars_per_token must be categories with numbers, not {self.chars_per_token!r}"
            )
        for name, value in self.chars_per_token.items():
            _number(f"chars_per_token: {name}", value, strict=True)
        for key in ("prompts", "tokenizer"):
            if getattr(self, key) is not None:
                _text(key, getattr(self, key))
        self.slo_config()

    def slo_config(self) -> SLOConfig:
        try:
            return SLOConfig(classes={n: c.slo_class() for n, c in self.classes.items()})
        except SLOError as e:
            raise LoadgenError(str(e)) from e

    @property
    def baseline_s(self) -> float | None:
        return None if self.baseline_ms is None else self.baseline_ms / 1e3

    def to_mapping(self) -> dict[str, Any]:
        """YAML form, read back by :func:`from_mapping`. Without secrets: it is kept with results."""
        data = asdict(self)
        data["server"]["headers"] = {k: v for k, v in self.server.headers.items() if not _secret(k)}
        for c in data["classes"].values():
            del c["name"]
        return data

    def save(self, path: str | Path) -> None:
        Path(path).write_text(yaml.safe_dump(self.to_mapping(), sort_keys=False), encoding="utf-8")


def _secret(header: str) -> bool:
    return header.lower() in ("authorization", "proxy-authorization", "cookie") or "key" in header.lower()


def secret_headers(server: Endpoint) -> dict[str, str]:
    """The headers that are never written to a file."""
    return {k: v for k, v in server.headers.items() if _secret(k)}


T = TypeVar("T")


def _build(cls: type[T], data: Any, where: str) -> T:
    """A dataclass from a mapping; unknown keys are refused, since a typo must not pass silently."""
    if not isinstance(data, Mapping):
        raise LoadgenError(f"{where}: expected keys and values, not {data!r}")
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(map(str, data)) - set(known))
    if unknown:
        raise LoadgenError(f"{where}: unknown key {unknown[0]!r}: known are {', '.join(known)}")
    try:
        return cls(**data)
    except TypeError as e:
        raise LoadgenError(f"{where}: {e}") from e


def _length(value: Any, where: str) -> Length:
    if isinstance(value, Mapping):
        return _build(Length, value, where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise LoadgenError(
            f"{where}: expected a number of tokens or {{median, sigma, low, high}}, not {value!r}"
        )
    return Length(value)


def _class(name: str, data: Any, base: ClassLoad | None) -> ClassLoad:
    where = f"class {name!r}"
    if not isinstance(data, Mapping):
        raise LoadgenError(
            f"{where}: expected a mapping such as {{x_baseline: 1.2, share: 0.6}}, not {data!r}"
        )
    data = dict(data)
    for key in ("prompt_tokens", "output_tokens"):
        if key in data:
            data[key] = _length(data[key], f"{where}: {key}")
    if data.get("arrivals") is not None:
        data["arrivals"] = _build(Arrivals, data["arrivals"], f"{where}: arrivals")
    if base is None:
        return _build(ClassLoad, {"name": name, **data}, where)
    unknown = sorted(set(data) - {f.name for f in fields(ClassLoad)})
    if unknown:
        raise LoadgenError(f"{where}: unknown key {unknown[0]!r}")
    return replace(base, **data)


def from_mapping(data: Any) -> BenchConfig:
    """Builds from parsed YAML. Classes of the default mix keep their defaults for keys not given."""
    if not isinstance(data, Mapping):
        raise LoadgenError("expected keys such as server, classes, arrivals, duration_s")
    data = dict(data)
    if "server" in data:
        data["server"] = _build(Endpoint, data["server"], "server")
    if "classes" in data:
        given, defaults = data["classes"], default_classes()
        if not isinstance(given, Mapping):
            raise LoadgenError(f"classes: expected class names with their settings, not {given!r}")
        data["classes"] = {
            str(n): _class(str(n), {} if v is None else v, _without_slo(defaults.get(str(n)), v))
            for n, v in given.items()
        }
    if data.get("arrivals") is not None:
        data["arrivals"] = _build(Arrivals, data["arrivals"], "arrivals")
    if data.get("trace") is not None:
        spec = data["trace"]
        data["trace"] = _build(TraceSpec, {"path": spec} if isinstance(spec, str) else spec, "trace")
    return _build(BenchConfig, data, "configuration")


def _without_slo(base: ClassLoad | None, given: Any) -> ClassLoad | None:
    """The default class, less its TPOT SLO when the file gives another one."""
    if base is None or not isinstance(given, Mapping) or not {"tpot_ms", "x_baseline"} & set(given):
        return base
    return replace(base, tpot_ms=None, x_baseline=None)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would quietly take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: str | Path) -> BenchConfig:
    """Reads a YAML file. Raises LoadgenError that names the file."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as e:
        raise LoadgenError(f"cannot read the configuration {path}: {why_unreadable(e)}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise LoadgenError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
    try:
        return from_mapping(data or {})
    except LoadgenError as e:
        raise LoadgenError(f"{path}: {e}") from e

"""SLOs and their classes, as the operator's YAML file names them.

Milliseconds outside, seconds inside; ``math.inf`` means "no objective".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from adaserve.checked import Checked, shown
from adaserve.errors import UserError
from adaserve.host.files import why_unreadable

TPOT_RANGE_MS = (0.1, 60_000.0)
TTFT_RANGE_MS = (1.0, 3_600_000.0)

DEFAULT_CLASS = "default"
"""Label of requests that ask for nothing."""
CUSTOM_CLASS = "custom"
"""Label of requests that give milliseconds, with a class or without: they do not spend the error budget of
a class with another SLO, and metrics labels stay bounded."""
KINDS = 2
"""Kinds of custom requests per octave of their TPOT SLOs."""
MAX_CLASSES = 32
ANONYMOUS = "anonymous"
"""Tenant of requests that carry no API key."""

TenantId = Annotated[str, Field(pattern="^([0-9a-f]{16}|anonymous)$")]
"""The first 16 digits of the SHA-256 of an API key, or ``ANONYMOUS``: files of classes need not hold keys."""
TpotMs = Annotated[float, Field(ge=TPOT_RANGE_MS[0], le=TPOT_RANGE_MS[1])]
TtftMs = Annotated[float, Field(ge=TTFT_RANGE_MS[0], le=TTFT_RANGE_MS[1])]


class SLOError(UserError, ValueError):
    """A bad objective; the text says which value was bad and what is accepted."""


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML takes the last without a word."""

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


def read_yaml(path: str | Path, what: str, refusal: type[UserError]) -> Any:
    """The contents of a file, which the error calls ``what``. Raises ``refusal``."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as e:
        raise refusal(f"cannot read the {what} {path}: {why_unreadable(e)}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # no such day; endless brackets
        raise refusal(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request, in seconds; inf = none."""

    slo_class: str  # one of SLOConfig.labels
    tpot_s: float = math.inf
    ttft_s: float = math.inf
    tenant: str = ANONYMOUS

    @property
    def kind(self) -> str:
        """Requests of a kind are served alike, so what one gets says what others will get."""
        return kind_of(self.slo_class, self.tpot_s)


@lru_cache(maxsize=1024)
def kind_of(slo_class: str, tpot_slo_s: float) -> str:
    """The class, and of requests with milliseconds of their own how many: they are served at very different
    speeds."""
    if slo_class != CUSTOM_CLASS or math.isinf(tpot_slo_s):
        return slo_class
    return f"{slo_class}/{round(KINDS * math.log2(tpot_slo_s))}"


class SLOClass(Checked):
    """A named kind of request. TPOT is absolute (``tpot_ms``) or ``x_baseline`` times the latency
    per token that the unloaded server was measured to have; with neither there is no TPOT SLO."""

    refusal = SLOError
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,31}$")]
    tpot_ms: TpotMs | None = None
    x_baseline: Annotated[float, Field(ge=0.05, le=1000.0)] | None = None
    ttft_ms: TtftMs | None = None
    # Share of requests that should attain, for dashboards and alerts.
    target: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    # Share of the running requests that the class may have while others wait; counts with --shed only.
    running_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    @model_validator(mode="after")
    def _one_tpot(self) -> SLOClass:
        if self.tpot_ms is not None and self.x_baseline is not None:
            raise SLOError("give tpot_ms or x_baseline, not both")
        return self

    def slo(self, baseline_s: float | None) -> SLO:
        """The objectives in seconds. Raises SLOError when they need a baseline that is unknown."""
        tpot_s = seconds(self.tpot_ms)
        if self.x_baseline is not None:
            tpot_s = times_baseline(self.x_baseline, baseline_s, self.name)
        return SLO(self.name, tpot_s, seconds(self.ttft_ms))


def seconds(ms: float | None) -> float:
    """inf for None."""
    return math.inf if ms is None else ms / 1e3


def to_ms(value_s: float | None) -> float | None:
    """None for inf and for None."""
    return None if value_s is None or not math.isfinite(value_s) else value_s * 1e3


def times_baseline(x_baseline: float, baseline_s: float | None, slo_class: str) -> float:
    """A TPOT in seconds. Raises SLOError when the baseline is unknown."""
    if baseline_s is None or not 0 < baseline_s < math.inf:
        raise SLOError(
            f"class {slo_class!r} is {x_baseline:g} x the baseline latency, which is not known here: "
            "measure it, or give the class an absolute tpot_ms"
        )
    return x_baseline * baseline_s


PAPER_MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}
"""Shares of the paper's classes in its traffic."""


def paper_classes() -> dict[str, SLOClass]:
    """The paper's artifact: baseline 30 ms; coding 1.2 x baseline, chat 50 ms, summarization 150 ms.
    As multiples, so that they mean the same on any host."""
    multiples = {"coding": 1.2, "chat": 50 / 30, "summarization": 150 / 30}
    return {name: SLOClass(name=name, x_baseline=x) for name, x in multiples.items()}


class SLOLimits(Checked):
    """What clients may ask for; classes are the operator's own and not limited."""

    refusal = SLOError
    own_ms: bool = True  # whether a request may state milliseconds instead of a class
    least_tpot_ms: TpotMs = TPOT_RANGE_MS[0]
    least_ttft_ms: TtftMs = TTFT_RANGE_MS[0]
    # Share of the time that one tenant's requests may hold up the prompts of others for their TPOT SLO.
    tenant_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    # Tenants from whose requests no draft may learn, whatever a request says of it.
    never_learn: Annotated[frozenset[TenantId], Field(strict=False)] = frozenset()


class SLOConfig(Checked):
    """The classes that a server or a load test knows, and the class of requests that name none."""

    refusal = SLOError
    classes: dict[str, SLOClass] = Field(default_factory=paper_classes, max_length=MAX_CLASSES)
    default_class: str | None = None
    limits: SLOLimits = SLOLimits()

    @model_validator(mode="before")
    @classmethod
    def _name_classes(cls, data: Any) -> Any:
        """In YAML a class's name is its key, and a class without settings is empty."""
        classes = data.get("classes")
        if not isinstance(classes, Mapping):
            return data
        named = {
            name: {"name": name, **(c or {})} if c is None or isinstance(c, Mapping) else c
            for name, c in classes.items()
        }
        return {**data, "classes": named}

    @model_validator(mode="after")
    def _known_names(self) -> SLOConfig:
        if CUSTOM_CLASS in self.classes:
            raise SLOError("the class name 'custom' is reserved for requests that give milliseconds only")
        for name, cls in self.classes.items():
            if cls.name != name:
                raise SLOError(f"class {name!r} has the name {cls.name!r}: leave it out")
        if self.default_class is not None and self.default_class not in self.classes:
            raise SLOError(f"default_class {self.default_class!r} is not one of: {self._names()}")
        if DEFAULT_CLASS in self.classes and self.default_class not in (None, DEFAULT_CLASS):
            raise SLOError(
                f"nobody could ask for the class 'default', since 'default' means {self.default_class!r}: "
                "give it another name, or leave default_class out"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> SLOConfig:
        """Reads a YAML file; raises SLOError with the file's name and what to change.

        ::

            default_class: chat
            classes:
              coding: {x_baseline: 1.2, target: 0.95}
              chat: {tpot_ms: 50, ttft_ms: 2000}
            limits: {own_ms: true, least_tpot_ms: 20, least_ttft_ms: 200, tenant_share: 0.5}
        """
        data = read_yaml(path, "SLO classes in", SLOError)
        if not isinstance(data, Mapping) or "classes" not in data:
            raise SLOError(f"{path}: expected a mapping 'classes:' of names to {{tpot_ms | x_baseline, ...}}")
        try:
            return cls(**{str(key): value for key, value in data.items()})
        except SLOError as e:
            raise SLOError(f"{path}: {e}") from e

    @property
    def labels(self) -> tuple[str, ...]:
        """Every value that ``SLO.slo_class`` can take."""
        return tuple(dict.fromkeys((*self.classes, DEFAULT_CLASS, CUSTOM_CLASS)))

    @property
    def needs_baseline(self) -> bool:
        return any(c.x_baseline is not None for c in self.classes.values())

    def get(self, name: str) -> SLOClass:
        """The class of that name; 'default' and 'custom' always exist. Raises SLOError."""
        if name == DEFAULT_CLASS:
            name = self.default_class or name
        if name in self.classes:
            return self.classes[name]
        if name in (DEFAULT_CLASS, CUSTOM_CLASS):
            return SLOClass(name=name)
        raise SLOError(f"unknown SLO class {shown(name)}: known classes are {self._names()}")

    def _names(self) -> str:
        return ", ".join(dict.fromkeys((*self.classes, DEFAULT_CLASS)))

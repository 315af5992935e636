"""The configuration of a load test: read from YAML, checked, written into results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BeforeValidator, Field, SkipValidation, model_validator

from adaserve.checked import shown
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.setting_types import Amount, Count, Flag, Positive, Setting, Share, Text, Whole, must
from adaserve.slo.classes import (
    PAPER_MIX,
    TPOT_RANGE_MS,
    SLOClass,
    SLOConfig,
    SLOError,
    paper_classes,
    read_yaml,
)

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, token
_MAX_MS = TPOT_RANGE_MS[1]
Api = Literal["completions", "chat", "generate"]
SLOHeaders = Literal["both", "ms", "class", "none"]
Numbers = Annotated[dict[str, Positive], must("be categories with numbers")]


class Length(Setting):
    """Token counts drawn per request: log-normal around ``median``, clipped to [low, high].
    ``sigma`` 0 = always ``median``."""

    median: SkipValidation[int] = 100
    sigma: SkipValidation[float] = 0.0
    low: SkipValidation[int] = 1
    high: SkipValidation[int] = 100_000

    @model_validator(mode="after")
    def _ordered(self) -> Length:
        whole = all(type(v) is int for v in (self.median, self.low, self.high))
        good = whole and 1 <= self.low <= self.median <= self.high and type(self.sigma) in (int, float)
        if not good or not 0 <= self.sigma <= 10:
            raise LoadgenError(
                f"a length needs whole numbers 1 <= low <= median <= high and sigma from 0 to 10, not {self}"
            )
        return self


def _length(value: Any) -> Any:
    if isinstance(value, Mapping | Length):
        return value
    if type(value) is not int:
        raise LoadgenError(f"expected a number of tokens or {{median, sigma, low, high}}, not {shown(value)}")
    return {"median": value}


Tokens = Annotated[Length, BeforeValidator(_length)]


class ClassLoad(SLOClass, Setting):
    """An SLO class, and how requests of it look."""

    refusal = LoadgenError  # type: ignore[assignment]
    share: Amount = 1.0  # weight in the mix
    arrivals: Arrivals | None = None  # its own arrivals instead of a share of the common ones
    prompt_tokens: Tokens = Length(median=100, sigma=0.5, low=8, high=2000)
    output_tokens: Tokens = Length(median=64)
    temperature: Amount = 0.0
    priority: Whole | None = None  # of SGLang's scheduling by priority; None = requests have none
    category: Text | None = None  # of the prompts; None = the class name
    turns: Count = 1
    think_s: Amount = 1.0  # pause between turns of a session
    disconnect: Share = 0.0  # share of requests that hang up in the first half


def default_classes() -> dict[str, ClassLoad]:
    """The paper's mix: 60% coding at 1.2 x baseline, chat and summarization in its proportions."""
    prompts = {
        "coding": Length(median=90, sigma=0.5, low=16, high=400),
        "chat": Length(median=40, sigma=0.6, low=8, high=200),
        "summarization": Length(median=400, sigma=0.4, low=100, high=900),
    }
    return {
        name: ClassLoad(**dict(slo), share=PAPER_MIX[name], prompt_tokens=prompts[name])
        for name, slo in paper_classes().items()
    }


class TraceSpec(Setting):
    """Which trace, and how it is fitted to this run."""

    path: Text
    format: Text = "auto"
    start_s: Amount = 0.0
    time_scale: Positive = 1.0
    target_rps: Positive | None = None
    sort: Flag = False
    # classes: a class of this file overrides the row's own SLO; trace: the reverse
    slo_from: Annotated[Literal["classes", "trace"], must("be classes or trace")] = "classes"
    max_prompt_tokens: Count | None = None  # clip, for models with a short context
    max_output_tokens: Count | None = None
    # max_tokens of every request; a server started with ADASERVE_REPLAY=1 ends answers where the trace does
    stated_max_tokens: Count | None = None


def _trace(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Endpoint(Setting):
    """Where requests go, in what form."""

    url: Text = "http://127.0.0.1:30000"
    model: Text | None = None  # None = the first that the server lists
    api: Annotated[Api, must("be completions, chat or generate")] = "completions"
    slo_headers: Annotated[SLOHeaders, must("be both, ms, class or none")] = "both"
    headers: SkipValidation[dict[str, str]] = Field(default_factory=dict)
    timeout_s: Positive = 600.0  # silence after which a request has failed
    total_s: Positive = 3600.0  # time after which it has failed although its answer goes on
    continuous_usage: Flag | None = None  # usage in every chunk (exact first-chunk sizes); None = find out
    ignore_eos: Flag = False
    insecure: Flag = False  # accept any TLS certificate

    @model_validator(mode="after")
    def _address(self) -> Endpoint:
        if not self.url.startswith(("http://", "https://")):
            raise LoadgenError(f"the server's URL must start with http:// or https://, not {self.url!r}")
        try:
            parts = urlsplit(self.url)
            complete = bool(parts.hostname) and parts.port != 0 and self.url.isascii() and " " not in self.url
            more = "@" in parts.netloc or bool(parts.query or parts.fragment)
        except ValueError:
            complete = more = False
        if more:  # not shown: it may be a password
            raise LoadgenError(
                "the server's URL must end with its path and name no user: give a key with --api-key, or as "
                "one of the headers: of the server in the configuration"
            )
        if not complete:
            raise LoadgenError(
                f"the server's URL needs a host and a port up to 65535, without spaces, not {self.url!r}"
            )
        return self

    @model_validator(mode="after")
    def _headers(self) -> Endpoint:
        if not isinstance(self.headers, Mapping):
            raise LoadgenError(f"headers must be names with values, not {shown(self.headers)}")
        for name, value in self.headers.items():
            good = isinstance(name, str) and isinstance(value, str) and _HEADER.fullmatch(name)
            if not good or not (value.isascii() and value.isprintable()):
                what = "what was given" if _secret(str(name)) else repr(value)
                raise LoadgenError(f"header {name!r} must be one line of text in ASCII, not {what}")
        return self


class BenchConfig(Setting):
    """Everything that decides what a run sends. Written to ``config.yaml`` of the results."""

    server: Endpoint = Endpoint()
    classes: dict[str, ClassLoad] = Field(default_factory=default_classes)
    arrivals: Arrivals = Field(default_factory=Arrivals)
    trace: Annotated[TraceSpec | None, BeforeValidator(_trace)] = None
    duration_s: Positive = 60.0
    max_requests: Count | None = None
    warmup_s: Amount = 0.0
    seed: Whole = 0
    baseline_ms: Annotated[Positive, Field(le=_MAX_MS), must(f"be at most {_MAX_MS:g}")] | None = None
    prompts: Text | None = None
    chars_per_token: Numbers = Field(default_factory=dict)
    tokenizer: Text | None = None  # Hugging Face folder or name, for exact prompt lengths

    @model_validator(mode="after")
    def _together(self) -> BenchConfig:
        if not self.classes:
            raise LoadgenError("at least one class is needed")
        if sum(c.share for c in self.classes.values()) <= 0:
            raise LoadgenError("the shares of the classes add up to 0")
        if self.warmup_s >= self.duration_s:
            raise LoadgenError(
                f"nothing is left to measure: the warm-up of {self.warmup_s:g} s is as long as the run of "
                f"{self.duration_s:g} s"
            )
        self.slo_config()
        return self

    def slo_config(self) -> SLOConfig:
        """The SLOs of all classes. Raises LoadgenError."""
        try:
            return SLOConfig(classes=dict(self.classes))
        except SLOError as e:
            raise LoadgenError(str(e)) from e

    @property
    def baseline_s(self) -> float | None:
        return None if self.baseline_ms is None else self.baseline_ms / 1e3

    def save(self, path: str | Path) -> None:
        """As ``load_config`` reads it. Without secrets: it is kept with results."""
        data = self.model_dump()
        data["server"]["headers"] = {k: v for k, v in self.server.headers.items() if not _secret(k)}
        for c in data["classes"].values():
            del c["name"]
        Path(path).write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


_SECRETS = ("auth", "cookie", "credential", "key", "password", "secret", "signature", "token")


def _secret(header: str) -> bool:
    # Rather one header too many than a key in a file that is shared.
    return any(word in header.lower() for word in _SECRETS)


def secret_headers(server: Endpoint) -> dict[str, str]:
    """The headers that are never written to a file."""
    return {k: v for k, v in server.headers.items() if _secret(k)}


def from_mapping(data: Any) -> BenchConfig:
    """Builds from parsed YAML. Classes of the default mix keep their defaults for keys not given."""
    if not isinstance(data, Mapping):
        raise LoadgenError("expected keys such as server, classes, arrivals, duration_s")
    data = {str(key): value for key, value in data.items()}
    if isinstance(data.get("classes"), Mapping):
        data["classes"] = {str(n): _class(str(n), {} if v is None else v) for n, v in data["classes"].items()}
    return BenchConfig(**data)


def _class(name: str, given: Any) -> Any:
    """What is given of a class over its defaults; a TPOT SLO replaces the default one, whatever its form."""
    if not isinstance(given, Mapping):
        return given
    defaults = default_classes()
    base = dict(defaults[name]) if name in defaults else {"name": name}
    if {"tpot_ms", "x_baseline"} & set(given):
        base |= {"tpot_ms": None, "x_baseline": None}
    return {**base, **given}


def load_config(path: str | Path) -> BenchConfig:
    """Reads a YAML file. Raises LoadgenError that names the file."""
    data = read_yaml(path, "configuration", LoadgenError)
    try:
        return from_mapping(data or {})
    except LoadgenError as e:
        raise LoadgenError(f"{path}: {e}") from e

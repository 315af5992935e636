"""What the options of ``bench serve`` make of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from adaserve.loadgen.config import BenchConfig, ClassLoad, Length, TraceSpec
from adaserve.loadgen.errors import LoadgenError

_BURSTINESS = 1e-4, 1e4


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given; the others are None."""
    return {k: v for k, v in values.items() if v is not None}


def with_server(config: BenchConfig, values: Mapping[str, Any], api_key: str | None) -> BenchConfig:
    """Another server, or another way to ask it."""
    changes = given(values)
    if api_key:
        changes["headers"] = {**config.server.headers, "Authorization": f"Bearer {api_key}"}
    return config.changed(server=config.server.changed(**changes))


def arrivals(rps: float | None, burstiness: float | None) -> dict[str, Any]:
    """``burstiness`` is vLLM's: the shape of a gamma distribution of gaps, below 1 for bursts. Raises
    LoadgenError."""
    if burstiness is None:
        return {"rps": rps}
    if not _BURSTINESS[0] <= burstiness <= _BURSTINESS[1]:
        low, high = _BURSTINESS
        raise LoadgenError(f"--burstiness must lie between {low:g} and {high:g}, not {burstiness:g}")
    return {"rps": rps, "kind": "gamma", "cv": 1.0 / math.sqrt(burstiness)}


def with_load(
    config: BenchConfig, trace: str | None, fit: Mapping[str, Any], arrivals: Mapping[str, Any]
) -> BenchConfig:
    """Other arrivals: of a process, or of a trace, fitted to the host. Raises LoadgenError."""
    if given(arrivals):
        if trace is not None:
            raise LoadgenError("--trace brings its own arrivals: use --target-rps instead of --rps")
        config = config.changed(trace=None, arrivals=config.arrivals.changed(**given(arrivals)))
    spec = TraceSpec(path=trace) if trace is not None else config.trace
    if given(fit) and spec is None:
        raise LoadgenError("--start, --target-rps and --time-scale need a --trace")
    return config.changed(trace=spec.changed(**given(fit)) if spec is not None else None)


def with_classes(config: BenchConfig, mix: str | None, slos: list[str]) -> BenchConfig:
    """``mix``: class=share,...; ``slos``: class=1.2x or class=50. Raises LoadgenError."""
    classes = dict(config.classes)
    if mix is not None:
        pairs = [_assignment(part, "--mix") for part in mix.split(",")]
        shares = dict(pairs)
        if len(shares) < len(pairs):
            raise LoadgenError(f"--mix: a class is named twice in {mix!r}")
        for name in shares:
            _known(classes, name, "--mix")
        classes = {n: classes[n].changed(share=_float(v, "--mix")) for n, v in shares.items()}
    for text in slos:
        name, value = _assignment(text, "--slo")
        _known(classes, name, "--slo")
        number = _float(value.removesuffix("x").removesuffix("ms"), "--slo")
        slo: dict[str, Any] = {"tpot_ms": None, "x_baseline": None}
        slo["x_baseline" if value.endswith("x") else "tpot_ms"] = number
        classes[name] = classes[name].changed(**slo)
    return config.changed(classes=classes)


def with_tokens(config: BenchConfig, output_tokens: int | None, temperature: float | None) -> BenchConfig:
    """The same for every class. Raises LoadgenError."""
    changes: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    if output_tokens is not None:
        if config.trace is not None:
            raise LoadgenError(
                "--trace brings its own lengths: leave --output-tokens out, or give the trace a "
                "max_output_tokens in the configuration"
            )
        changes["output_tokens"] = Length(median=output_tokens)
    return config.changed(classes={n: c.changed(**changes) for n, c in config.classes.items()})


def _assignment(text: str, option: str) -> tuple[str, str]:
    name, separator, value = text.strip().partition("=")
    if not separator or not name or not value:
        raise LoadgenError(f"{option}: expected class=value, not {text!r}")
    return name, value


def _known(classes: Mapping[str, ClassLoad], name: str, option: str) -> None:
    if name not in classes:
        raise LoadgenError(f"{option}: unknown class {name!r}: known are {', '.join(classes)}")


def _float(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise LoadgenError(f"{option}: {text!r} is not a number") from None

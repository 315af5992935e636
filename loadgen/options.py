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
        others = {k: v for k, v in config.server.headers.items() if k.lower() != "authorization"}
        changes["headers"] = {**others, "Authorization": f"Bearer {api_key}"}
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
    """Other arrivals: of a process, or of a trace, fitted to the host. Another trace is fitted as that of the
    configuration was. Raises LoadgenError."""
    if given(arrivals):
        if trace is not None:
            raise LoadgenError("--trace brings its own arrivals: use --target-rps instead of --rps")
        config = config.changed(trace=None, arrivals=config.arrivals.changed(**given(arrivals)))
    spec = config.trace
    if trace is not None:
        spec = TraceSpec(path=trace) if spec is None else spec.changed(path=trace)
    if given(fit) and spec is None:
        raise LoadgenError("--start, --target-rps and --time-scale need a --trace")
    return config.changed(trace=spec.changed(**given(fit)) if spec is not None else None)


def with_count(config: BenchConfig, values: Mapping[str, Any]) -> BenchConfig:
    """``values``: how many requests at most, for how long, or ``num_prompts`` however long they take.

    ``warmup_s`` is one of them, since a run must be longer than its warm-up. Raises LoadgenError."""
    limits = {k: values[k] for k in ("duration_s", "max_requests")}
    warmup = given({"warmup_s": values["warmup_s"]})
    count = values["num_prompts"]
    if count is None:
        return config.changed(**given(limits), **warmup)
    if given(limits) or config.trace is not None:
        raise LoadgenError(
            "--num-prompts is the length of a run without a trace: it cannot be given with a trace, "
            "--duration or --max-requests"
        )
    config = config.changed(max_requests=count)
    shared = any(c.arrivals is None and c.share > 0 for c in config.classes.values())
    processes = [c.arrivals for c in config.classes.values() if c.arrivals is not None]
    processes += [config.arrivals] * shared
    if any(p.kind in ("ramp", "peak") for p in processes):
        raise LoadgenError(
            "arrivals of kind ramp and peak depend on the duration: give --duration and --max-requests, not "
            "--num-prompts"
        )
    longest_s = [p.longest_s(count) for p in processes if p.rps > 0]
    duration_s = min(longest_s, default=config.duration_s)
    return config.changed(duration_s=duration_s, **warmup)


def with_classes(config: BenchConfig, mix: str | None, slos: list[str]) -> BenchConfig:
    """``mix``: class=share,...; ``slos``: see ``_objectives``. Raises LoadgenError."""
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
        classes[name] = classes[name].changed(**_objectives(value))
    return config.changed(classes=classes)


def _objectives(text: str) -> dict[str, Any]:
    """What ``--slo`` states of a class: ``1.2x`` (baselines) or ``50`` (ms) or ``tpot:50`` of its TPOT,
    ``ttft:2000`` of its TTFT, or one of each with a comma. What is not stated stays as it was."""
    slo = dict[str, Any]()
    for part in text.split(","):
        kind, _, value = part.strip().rpartition(":")
        if kind not in ("", "tpot", "ttft"):
            raise LoadgenError(f"--slo: {kind!r} is not an objective: known are tpot and ttft")
        number, multiple = _float(value.removesuffix("x").removesuffix("ms"), "--slo"), value.endswith("x")
        if f"{kind or 'tpot'}_ms" in slo:
            raise LoadgenError(f"--slo: {text!r} states {(kind or 'tpot').upper()} twice")
        if kind != "ttft":
            slo |= {"tpot_ms": None, "x_baseline": None, "x_baseline" if multiple else "tpot_ms": number}
        elif multiple:
            raise LoadgenError(f"--slo: a TTFT is in milliseconds, not in baselines: {part!r}")
        else:
            slo["ttft_ms"] = number
    return slo


def with_tokens(config: BenchConfig, output_tokens: int | None, temperature: float | None) -> BenchConfig:
    """The same number of output tokens, and the same temperature, for every class. Raises LoadgenError."""
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

"""The whole schedule of a run, built before anything is sent: pure, seeded, hashable.

Building first and sending at absolute times is what makes the load open-loop: a slow server cannot
slow the arrivals down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve.loadgen.arrivals import arrival_times
from adaserve.loadgen.config import BenchConfig, ClassLoad, Length, TraceSpec
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.prompts import PromptStore, load_prompts
from adaserve.slo.classes import SLO, SLOConfig, SLOError, to_ms
from adaserve.slo.trace import Trace, TraceError, TraceRow, assign_classes
from adaserve.slo.trace_formats import read_trace

# Independent random streams: changing one input leaves the others' draws as they were.
_ARRIVALS, _LENGTHS, _DISCONNECT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request that will be sent."""

    index: int
    at_s: float  # planned time from the start of the run
    slo_class: str
    tpot_ms: float | None  # objectives that are sent and judged; None = none
    ttft_ms: float | None
    prompt: str
    prompt_tokens: int  # as planned; the record has the server's count
    max_tokens: int  # as the client states it
    temperature: float = 0.0
    priority: int | None = None
    session: str | None = None
    turn: int = 0
    think_s: float = 0.0  # wait after the previous turn's answer
    disconnect_after: int | None = None  # hang up after this many tokens
    answer_tokens: int | None = None  # where the answer ends before max_tokens; replaying servers are told

    @property
    def conversation(self) -> str:
        """Equal for the turns of a session; a request without one stands alone."""
        return f"s{self.session}" if self.session is not None else f"#{self.index}"


@dataclass(frozen=True)
class Schedule:
    """Requests by planned time, and the trace that they amount to."""

    requests: tuple[PlannedRequest, ...]
    trace_sha256: str
    prompts_source: str
    needs_baseline: bool  # a class's SLO or a row's own is a multiple of the baseline latency

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0

    def shard(self, index: int, count: int) -> tuple[PlannedRequest, ...]:
        """The part of worker ``index`` of ``count``. Turns of a session stay together."""
        order: dict[str, int] = {}
        for r in self.requests:
            order.setdefault(r.conversation, len(order))
        return tuple(r for r in self.requests if order[r.conversation] % count == index)


def build_schedule(config: BenchConfig) -> Schedule:
    """Plans the run. Raises LoadgenError for anything that cannot be sent as asked."""
    try:
        trace = _from_trace(config, config.trace) if config.trace is not None else _synthetic(config)
        if config.max_requests is not None:
            trace = replace(trace, rows=trace.rows[: config.max_requests])
        if not trace.rows:
            raise LoadgenError("the schedule is empty: raise the rate or the duration, or check the window")
        if max(row.arrival_s for row in trace.rows) < config.warmup_s:
            raise LoadgenError(
                f"nothing is left to measure: all {len(trace.rows)} requests are sent within the warm-up of "
                f"{config.warmup_s:g} s"
            )
        store = load_prompts(config.prompts, config.chars_per_token, _tokenizer(config.tokenizer))
        return _plan(config, trace, store)
    except (TraceError, SLOError) as e:
        raise LoadgenError(str(e)) from e


def schedule_before_baseline(config: BenchConfig) -> Schedule:
    """The plan while the baseline may not be known: of all its figures only SLOs depend on it."""
    return build_schedule(config.changed(baseline_ms=config.baseline_ms or 30.0))


def _from_trace(config: BenchConfig, spec: TraceSpec) -> Trace:
    trace = read_trace(spec.path, spec.format, spec.sort)
    if trace.is_recorded:
        trace = Trace.merged([trace])  # from its first request on
    # The start is counted in the trace's own time, the duration in the run's.
    trace = trace.window(spec.start_s)
    if spec.target_rps is not None:
        trace = trace.at_rps(spec.target_rps)
    trace = trace.scaled(spec.time_scale).window(0.0, config.duration_s)
    mix = {name: c.share for name, c in config.classes.items()}
    return replace(trace, rows=tuple(assign_classes(trace.rows, mix, config.seed)))


def _synthetic(config: BenchConfig) -> Trace:
    rows: list[TraceRow] = []
    shared = {n: c.share for n, c in config.classes.items() if c.arrivals is None and c.share > 0}
    if shared:
        rng = np.random.default_rng([config.seed, _ARRIVALS])
        times = arrival_times(config.arrivals, config.duration_s, rng)
        rows += assign_classes([TraceRow(float(t), 1, 1) for t in times], shared, config.seed)
    for k, c in enumerate(config.classes.values()):
        if c.arrivals is not None:
            rng = np.random.default_rng([config.seed, _ARRIVALS, k + 1])
            times = arrival_times(c.arrivals, config.duration_s, rng)
            rows += [TraceRow(float(t), 1, 1, slo_class=c.name) for t in times]
    rows.sort(key=lambda r: r.arrival_s)
    rng = np.random.default_rng([config.seed, _LENGTHS])
    return Trace(tuple(t for k, r in enumerate(rows) for t in _turns(config, r, k, rng)), "synthetic")


def _turns(config: BenchConfig, row: TraceRow, number: int, rng: np.random.Generator) -> list[TraceRow]:
    """The row with drawn lengths; several rows of one session when its class has several turns."""
    c = config.classes[row.slo_class or ""]
    drawn = [
        replace(row, prompt_tokens=_draw(c.prompt_tokens, rng), output_tokens=_draw(c.output_tokens, rng))
        for _ in range(c.turns)
    ]
    return drawn if c.turns == 1 else [replace(r, session_id=f"s{number}") for r in drawn]


def _draw(length: Length, rng: np.random.Generator) -> int:
    value = length.median * math.exp(length.sigma * rng.standard_normal())
    return round(min(max(value, length.low), length.high))


def _plan(config: BenchConfig, trace: Trace, store: PromptStore) -> Schedule:
    slo_config, turns = config.slo_config(), Counter[str]()
    hang_up = np.random.default_rng([config.seed, _DISCONNECT]).uniform(size=(len(trace.rows), 2))
    requests = []
    needs_baseline = slo_config.needs_baseline
    for index, row in enumerate(trace.rows):
        c = config.classes.get(row.slo_class or "")
        judged = _judged(config, slo_config, trace, row)
        needs_baseline |= judged.slo_x_baseline is not None
        request = _request(index, row, c, judged.slo(slo_config, config.baseline_s), store, config)
        if row.session_id is not None:
            request = replace(request, turn=turns[row.session_id])
            turns[row.session_id] += 1
        if c is not None and hang_up[index, 0] < c.disconnect:
            length = request.answer_tokens or request.max_tokens
            request = replace(request, disconnect_after=1 + int(hang_up[index, 1] * length / 2))
        requests.append(request)
    return Schedule(tuple(requests), trace.sha256, store.source, needs_baseline)


def _judged(config: BenchConfig, slo_config: SLOConfig, trace: Trace, row: TraceRow) -> TraceRow:
    """The row with the SLO that counts: its class's, or its own if the configuration says so or does not
    have the class. Raises LoadgenError if there is none."""
    has_class = row.slo_class in config.classes
    keep_own = config.trace is not None and (config.trace.slo_from == "trace" or not has_class)
    judged = row if keep_own else replace(row, slo_tpot_ms=None, slo_x_baseline=None, slo_ttft_ms=None)
    known = row.slo_class in slo_config.labels
    if not known and row.slo_tpot_ms is None and row.slo_x_baseline is None and row.slo_ttft_ms is None:
        raise LoadgenError(
            f"{trace.source}: unknown class {row.slo_class!r} (known are {', '.join(config.classes)}): "
            "name it under classes: in the configuration, or give its rows slo_tpot_ms or slo_ttft_ms"
        )
    return judged if known else replace(judged, slo_class=None)


def _request(
    index: int, row: TraceRow, c: ClassLoad | None, slo: SLO, store: PromptStore, config: BenchConfig
) -> PlannedRequest:
    spec = config.trace
    n_prompt = _clip(row.prompt_tokens, spec.max_prompt_tokens if spec else None)
    n_answer = _clip(row.output_tokens, spec.max_output_tokens if spec else None)
    stated = spec.stated_max_tokens if spec else None
    key = row.prompt_id or f"{config.seed}/{index}"
    category = (c.category if c else None) or row.slo_class or ""
    return PlannedRequest(
        index=index,
        at_s=row.arrival_s,
        slo_class=row.slo_class or "default",
        tpot_ms=to_ms(slo.tpot_s),
        ttft_ms=to_ms(slo.ttft_s),
        prompt=row.text if row.text else store.get(category, n_prompt, f"{category}/{key}"),
        prompt_tokens=n_prompt,
        max_tokens=n_answer if stated is None else max(n_answer, stated),
        answer_tokens=None if stated is None else n_answer,
        temperature=c.temperature if c else 0.0,
        priority=c.priority if c else None,
        session=row.session_id,
        think_s=c.think_s if c and spec is None else 0.0,
    )


def _clip(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _tokenizer(name: str | None):  # type: ignore[no-untyped-def]
    """A Hugging Face tokenizer, only imported when asked for."""
    if name is None:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as e:
        raise LoadgenError(
            f"cannot load the tokenizer {name!r} (give a model's folder or name): {str(e).splitlines()[0]}"
        ) from e


def plan_figures(config: BenchConfig, schedule: Schedule) -> dict[str, Any]:
    """What ``summary.json`` says of the plan, however the run ended."""
    return {
        "seed": config.seed,
        "trace_sha256": schedule.trace_sha256,
        "planned_requests": len(schedule),
        "model": config.server.model,
        "baseline_ms": config.baseline_ms,
        "class_targets": {n: c.target for n, c in config.classes.items()},
    }


def class_counts(requests: Sequence[PlannedRequest]) -> Mapping[str, int]:
    """How many requests each class has, by name."""
    return dict(sorted(Counter(r.slo_class for r in requests).items()))

"""Traffic of a point: classes with their SLOs, arrivals, lengths, prompts. Pure and seeded.

All policies of a point and seed get the same requests at the same times. Points with the same seed share
their random draws, so that neighbors on an axis differ by what the axis changes and little else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from adaserve.bench.sweep.kinds import KINDS
from adaserve.bench.sweep.plan import PAPER_SHARE, PROMPT_SCALE, Point, SweepError
from adaserve.bench.sweep.ttft import PrefillTime, ttft_slo_ms
from adaserve.scheduler.interface import FloatArray, IntArray
from adaserve.slo.classes import PAPER_MIX, SLOClass, SLOConfig, to_ms
from adaserve.slo.trace import Trace, TraceRow, assign_classes

MAX_PROMPT_TOKENS = 768
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 8, 256
PEAK_SHARE, PEAK_WIDTH = 0.65, 0.07
"""Share of a class's requests that come in its peak; the peak's standard deviation, as a share of the run."""

_ARRIVALS, _CLASSES, _LENGTHS, _PROMPTS, _KINDS = 1, 2, 3, 4, 5


PAPER_PROMPTS = {"coding": (119, 0.5), "chat": (15, 0.55), "summarization": (703, 0.5)}
"""Median and sigma of the log-normal prompt lengths of the paper's artifact, before scaling."""
OTHER_PROMPTS = PAPER_PROMPTS["coding"]


@dataclass(frozen=True)
class Workload:
    """Classes, their SLOs as multiples or milliseconds, and where arrivals and lengths come from."""

    slos: SLOConfig = field(default_factory=SLOConfig)
    trace: Trace | None = None
    prompt_scale: float = PROMPT_SCALE
    output_scale: float = 0.5
    temperature: float = 0.8

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slos.classes)

    def urgent(self, baseline_s: float) -> str:
        """The class with the tightest TPOT SLO."""
        return min(self.names, key=lambda n: self.slos.classes[n].slo(baseline_s).tpot_s)

    def mix(self, urgent: str, share: float | None) -> dict[str, float]:
        """Shares of the classes: the urgent one as given (the paper: 0.6), the others evenly as in the
        paper's artifact."""
        if share is None and set(self.names) == set(PAPER_MIX):
            return PAPER_MIX
        share = PAPER_SHARE if share is None else share
        others = [n for n in self.names if n != urgent]
        if not others:
            return {urgent: 1.0}
        return {urgent: share} | dict.fromkeys(others, (1.0 - share) / len(others))

    def slo_ms(self, point: Point, baseline_ms: float) -> dict[str, float | None]:
        """TPOT SLO of every class at a point, ms; None = no objective."""
        urgent = self.urgent(baseline_ms / 1e3)
        found: dict[str, float | None] = {}
        for name, own in self.slos.classes.items():
            scaled = SLOClass(name=name, x_baseline=point.scale) if point.scale is not None else own
            found[name] = to_ms((scaled if name == urgent else own).slo(baseline_ms / 1e3).tpot_s)
        return found

    def draw_lengths(self, name: str, n: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Prompt and output tokens of n requests of a class, scaled and clipped to this host."""
        rows = [r for r in self.trace.rows if r.slo_class in (name, None)] if self.trace else []
        if rows:
            picked = [rows[int(k)] for k in rng.integers(len(rows), size=n)]
            return self.scaled([r.prompt_tokens for r in picked], [r.output_tokens for r in picked])
        median, sigma = PAPER_PROMPTS.get(name, OTHER_PROMPTS)
        prompts = median * np.exp(sigma * rng.standard_normal(n))
        outputs = MAX_OUTPUT_TOKENS * rng.uniform(0.64, 1.0, n)  # the artifact's cap; it had 210 on average
        return self.scaled(prompts.tolist(), outputs.tolist())

    def scaled(self, prompts: Sequence[float], outputs: Sequence[float]) -> tuple[list[int], list[int]]:
        """Lengths times their scales, within what the embedded pair can hold."""
        return (
            [min(MAX_PROMPT_TOKENS, max(4, round(p * self.prompt_scale))) for p in prompts],
            [min(MAX_OUTPUT_TOKENS, max(MIN_OUTPUT_TOKENS, round(o * self.output_scale))) for o in outputs],
        )


class Pool(Protocol):
    """Prompts of a class."""

    def pick(self, category: str, tokens: int, rng: np.random.Generator) -> tuple[str, int]: ...


def build_rows(
    workload: Workload,
    pool: Pool,
    point: Point,
    rate_rps: float,
    seconds: float,
    seed: int,
    urgent: str,
    blocks: int = 1,
) -> tuple[TraceRow, ...]:
    """The requests of a point: round(rate * seconds) of them, sorted by time, played in ``blocks`` of equal
    length. Raises SweepError."""
    n = round(rate_rps * seconds)
    if n < 1:
        raise SweepError(
            f"{rate_rps:.3g} requests/s for {seconds:g} s give no request: raise --seconds or the load"
        )
    trace = workload.trace
    rows = _sampled(workload, trace, n, seed) if trace else [TraceRow(0.0, 1, 1)] * n
    given = {r.slo_class for r in rows if r.slo_class}
    if not given or point.urgent is not None or not given <= set(workload.names):
        rows = _classified(workload, rows, workload.mix(urgent, point.urgent), seed)
    else:
        rows = list(assign_classes(rows, workload.mix(urgent, None), seed))
    if trace is None:
        rows = _with_lengths(workload, rows, seed)
    times = _peaks(rows, workload.names, seconds, seed) if point.peaks else _times(trace, n, seconds, seed)
    rng = np.random.default_rng([seed, _PROMPTS])
    placed = sorted(zip(times.tolist(), rows, strict=True), key=lambda pair: pair[0])
    done = []
    for at, row in placed:
        text, tokens = pool.pick(row.slo_class or "", row.prompt_tokens, rng)
        done.append(replace(row, arrival_s=round(at, 6), text=text, prompt_tokens=tokens))
    if point.kind is not None and point.kind in KINDS:
        done = KINDS[point.kind](done, np.random.default_rng([seed, _KINDS]), seconds / blocks)
    return tuple(done)


def with_slos(
    workload: Workload, rows: Sequence[TraceRow], point: Point, baseline_ms: float, prefill: PrefillTime
) -> tuple[TraceRow, ...]:
    """The rows with both SLOs of each, in milliseconds: what is sent, judged, and simulated."""
    tpot_ms, classes = workload.slo_ms(point, baseline_ms), workload.slos.classes
    return tuple(
        replace(
            r,
            slo_tpot_ms=None if (tpot := tpot_ms[r.slo_class or ""]) is None else round(tpot, 4),
            slo_ttft_ms=ttft_slo_ms(classes[r.slo_class or ""], r.prompt_tokens, prefill),
        )
        for r in rows
    )


def block_of(rows: Sequence[TraceRow], block: int, seconds: float) -> tuple[TraceRow, ...]:
    """The rows that arrive in ``[block, block + 1) x seconds``, with times from the block's start.

    Raises SweepError for an empty block."""
    start_s = block * seconds
    mine = [r for r in rows if start_s <= r.arrival_s < start_s + seconds]
    if not mine:
        raise SweepError(f"no request arrives in block {block}: raise --seconds or the load")
    return tuple(replace(r, arrival_s=round(r.arrival_s - start_s, 6)) for r in mine)


def uncached_tokens(requests: Iterable[tuple[str | None, int, int]]) -> list[int]:
    """Tokens of each prompt that a server has to read: turns of a conversation find those before them in the
    cache. ``requests``, by arrival: conversation, tokens of the prompt, tokens of the answer."""
    cached: dict[str | None, int] = {}
    found = []
    for session, prompt, answer in requests:
        found.append(prompt - cached.get(session, 0))
        if session is not None:
            cached[session] = prompt + answer
    return found


def seconds_of_work(rows: Sequence[TraceRow], prefill: PrefillTime, token_s: float) -> float:
    """What a request of these takes on average, when a token of output takes ``token_s``."""
    read = uncached_tokens((r.session_id, r.prompt_tokens, r.output_tokens) for r in rows)
    output = float(np.mean([r.output_tokens for r in rows]))
    return prefill.ms(float(np.mean(read))) / 1e3 + output * token_s


def _window(trace: Trace, n: int, seed: int) -> IntArray:
    """Indices of n consecutive rows of the trace; each seed gets other rows while there are enough."""
    return (seed * n + np.arange(n)) % len(trace)


def _sampled(workload: Workload, trace: Trace, n: int, seed: int) -> list[TraceRow]:
    """Rows of the trace with lengths that fit; SLOs and sessions of the file are left out."""
    rows = [trace.rows[int(k)] for k in _window(trace, n, seed)]
    prompts, outputs = workload.scaled([r.prompt_tokens for r in rows], [r.output_tokens for r in rows])
    return [
        TraceRow(0.0, p, o, slo_class=r.slo_class) for r, p, o in zip(rows, prompts, outputs, strict=True)
    ]


def _classified(
    workload: Workload, rows: Sequence[TraceRow], mix: Mapping[str, float], seed: int
) -> list[TraceRow]:
    """The rows with exactly these shares of classes, in random order, with lengths of their new class."""
    n = len(rows)
    names = list(mix)
    ends = np.round(np.cumsum([mix[k] for k in names]) / sum(mix.values()) * n).astype(int)
    counts = np.diff(ends, prepend=0)
    labels = np.repeat(np.array(names), counts)
    np.random.default_rng([seed, _CLASSES]).shuffle(labels)
    labelled = [replace(r, slo_class=str(name)) for r, name in zip(rows, labels, strict=True)]
    return _with_lengths(workload, labelled, seed) if any(r.slo_class for r in rows) else labelled


def _with_lengths(workload: Workload, rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    result = list(rows)
    for k, name in enumerate(workload.names):
        rng = np.random.default_rng([seed, _LENGTHS, k])
        mine = [i for i, r in enumerate(rows) if r.slo_class == name]
        lengths = workload.draw_lengths(name, len(mine), rng)
        for i, p, o in zip(mine, *lengths, strict=True):
            result[i] = replace(result[i], prompt_tokens=p, output_tokens=o)
    return result


def _times(trace: Trace | None, n: int, seconds: float, seed: int) -> FloatArray:
    """Exactly n arrivals in [0, seconds): those of a Poisson process given their number, or the trace's
    own gaps stretched evenly."""
    if trace is None:
        gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(size=n + 1)
    else:
        at = np.array([r.arrival_s for r in trace.rows])
        mean = float(at[-1] - at[0]) / max(1, len(at) - 1) or 1.0
        # The gap before row 0 is unknown: a mean one closes the ring.
        ring = np.concatenate([[mean], np.diff(at)])
        gaps = np.append(ring[_window(trace, n, seed)], mean)
    return np.cumsum(gaps[:-1]) / gaps.sum() * seconds


def _peaks(rows: Sequence[TraceRow], names: Sequence[str], seconds: float, seed: int) -> FloatArray:
    """Times at which class k of m peaks around (k + 0.5) / m of the run."""
    times = np.empty(len(rows))
    for k, name in enumerate(names):
        mine = np.array([i for i, r in enumerate(rows) if r.slo_class == name], int)
        rng = np.random.default_rng([seed, _ARRIVALS, k + 1])
        n_peak = round(PEAK_SHARE * len(mine))
        peak = (k + 0.5) / len(names) + PEAK_WIDTH * rng.standard_normal(n_peak)
        at = np.concatenate([np.clip(peak, 0.0, 0.999), rng.uniform(0, 1, len(mine) - n_peak)])
        times[rng.permutation(mine)] = at * seconds
    return times

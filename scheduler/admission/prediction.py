"""What one more request would get: its TPOT, and how long it would wait for its prefill.

The TPOT of a request is the time from one decode iteration to the next, divided by its tokens per iteration.
Both are remembered by batch size, up to a factor of two. Times are stored as they would be on a quiet host,
because the host may have become busy, or quiet, since a batch of that size ran. Between sizes the latency
model of the policies says how iterations grow, with the shape of the trees that are usual at the nearest one.
"""

from __future__ import annotations

import math
from itertools import compress
from typing import NamedTuple

import numpy as np

from adaserve.scheduler.admission.gate import GATE_CLAIM, STARTING_ITERATIONS
from adaserve.scheduler.admission.order import overtaking
from adaserve.scheduler.admission.prefill import plan_prefill
from adaserve.scheduler.admission.situation import Situation, prefill_s
from adaserve.scheduler.averages import MovingAverage, blend
from adaserve.scheduler.costs.latency import Latency
from adaserve.scheduler.interface import Context, FloatArray, IterationOutcome
from adaserve.slo.classes import kind_of

NEWEST = 0.05
"""Weight of the newest iteration: the last two dozen count."""

NEWEST_SIZE = 0.01
"""Weight of the newest iteration for the size of the batch, which changes from one iteration to the next."""


class _Usual(NamedTuple):
    """Means over recent iterations of one batch size, up to a factor of two."""

    n: float
    quiet_s: float  # from the end of one iteration to the end of the next, prefills included
    pace: float  # tokens per request and iteration
    verified: float  # tokens of a verification
    depth: float
    width: float
    context: float  # cached tokens, all requests


class TPOTPredictor:
    """Learns from iterations; has no clock."""

    def __init__(self, latency: Latency) -> None:
        self._latency = latency
        self._means: dict[int, _Usual] = {}  # by the bits of the batch size
        self._paces: dict[tuple[int, str], float] = {}  # tokens per iteration, by these bits and SLO.kind
        self._usual_size = MovingAverage(NEWEST_SIZE)  # requests in a batch

    def observe(self, outcome: IterationOutcome) -> None:
        """Learns from an iteration. Requests that may not speculate say nothing about what others get."""
        running, n = outcome.plan.running, len(outcome.plan.running)
        self._usual_size.add(n)
        kinds = map(kind_of, running.slo_class, running.tpot_slo_s.tolist())
        each = zip(kinds, outcome.new_tokens.tolist(), strict=True)
        speculating = list(compress(each, running.max_depth.tolist()))
        if not speculating:
            return
        size = n.bit_length()
        verified, steps = outcome.selection.verify_tokens, outcome.trees.draft_steps
        context = float(running.context_tokens.sum())
        # Plain numbers: for so few of them arrays are slower, and this runs in every iteration.
        quiet_s = outcome.cycle_s / self._latency.slowdown
        mean = sum(new for _, new in speculating) / len(speculating)
        seen = _Usual(n, quiet_s, mean, verified, steps, outcome.plan.draft.width, context)
        known = self._means.get(size, seen)
        self._means[size] = _Usual(*(blend(k, s, NEWEST) for k, s in zip(known, seen, strict=True)))
        emitted: dict[str, list[int]] = {}
        for kind, new in speculating:
            emitted.setdefault(kind, []).append(new)
        for kind, mine in emitted.items():
            pace = sum(mine) / len(mine)
            self._paces[size, kind] = blend(self._paces.get((size, kind), pace), pace, NEWEST)

    def with_one_more(self, running: int, waiting: int, slots: int) -> int:
        """Requests that will decode together with one that arrives now. Waiting requests fill the batch up to
        its usual size; if more of them wait, each replaces one that has ended."""
        usual = round(self._usual_size.value)
        filling = min(waiting, max(0, usual - running)) if usual else waiting
        return min(slots, running + filling + 1)

    def cycle_s(self, n: int) -> float:
        """Seconds per iteration while ``n`` requests decode."""
        size = self._size(n)
        if size is None:
            return self._latency.iteration_s(max(1, n), 0, 1, max(1, n))
        usual = self._means[size]
        grown = self._iteration_s(usual, n) - self._iteration_s(usual, usual.n)
        return max(usual.quiet_s * self._latency.slowdown + grown, self._latency.verify_s(float(n)))

    def tpot_s(self, kind: str, n: int) -> float:
        """Predicted TPOT of a request of that kind (``SLO.kind``) that is one of ``n``."""
        return self.cycle_s(n) / self.pace(kind, n)

    def pace(self, kind: str, n: int) -> float:
        """Tokens per iteration of a request of that kind; of any kind if none was seen, and 1 while nothing
        is known."""
        size = self._size(n)
        if size is None:
            return 1.0
        return max(1.0, self._paces.get((size, kind), self._means[size].pace))

    def _size(self, n: int) -> int | None:
        """The nearest known size. It is not that of the present batch: with more requests each gets smaller
        trees, so that both iterations and tokens per iteration grow less than the present trees suggest."""
        return min(self._means, key=lambda size: abs(size - max(1, n).bit_length()), default=None)

    def _iteration_s(self, usual: _Usual, n: float) -> float:
        rows, per_row = max(1, round(n)), usual.verified / usual.n
        depth, width = round(usual.depth), max(1, round(usual.width))
        context = Context(usual.context / usual.n * n, rows)
        return self._latency.iteration_s(rows, depth, width, max(1, round(per_row * n)), context)


def predicted_wait_s(situation: Situation, finish_s: FloatArray, slots: int) -> float:
    """Seconds until the prefill of the last prompt that waits starts.

    ``finish_s`` [n]: seconds until each running request ends, rising. ``slots``: requests that may run at the
    same time. It waits for the prompts that are due before it, for a slot, and while it would take too much
    of the tightest running SLO (``held_back``). Prompts that the cache holds are counted in full.
    """
    config, waiting, interference = situation.config, situation.waiting, situation.interference
    last, n = len(waiting.arrival_s) - 1, len(finish_s)
    aims = situation.aims_s
    ahead = aims <= aims[last]
    if not overtaking(config, waiting, aims)[last]:
        ahead |= waiting.started
    ahead[last] = False
    before = int(waiting.prompt_left[ahead].sum())
    prefills_s = prefill_s(np.array([before, before + waiting.prompt_left[last]]), interference)
    work_s, with_it_s = (prefills_s + waiting.encode_s[ahead].sum()).tolist()
    wait_s = work_s / (config.late_share if n and config.pacing == "slack" else 1.0)
    if last not in plan_prefill(situation, n).order:
        latest_s = float(aims[last]) - situation.now_s - STARTING_ITERATIONS * interference.period_s
        latest_s -= with_it_s / GATE_CLAIM
        if config.lost_every_s is not None and math.isinf(waiting.ttft_slo_s[last]):
            latest_s = math.inf
        wait_s = max(wait_s, min(latest_s, float(finish_s[min(int(ahead.sum()), n - 1)]) if n else 0.0))
    missing = n + int((ahead | waiting.started).sum()) + 1 - slots
    if missing > 0 and n:
        wait_s = max(wait_s, float(finish_s[min(missing, n) - 1]))
    return wait_s

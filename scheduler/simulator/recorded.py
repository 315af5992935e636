"""Trees recorded from the engine as a source of children: claimed probabilities and what they were worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from adaserve.scheduler.acceptance import find_tested
from adaserve.scheduler.acceptance_calibration import Calibrator, bin_of, claimed_probability
from adaserve.scheduler.costs.latency import ForwardCost, Latency
from adaserve.scheduler.costs.prefills import LearnedPrefills
from adaserve.scheduler.interface import Context, FloatArray
from adaserve.scheduler.iteration_recording import (
    RecordedIteration,
    RecordedPrefill,
    read_events,
    read_recording,
)
from adaserve.scheduler.simulator.workload import TextModel

MOST = 0.999
"""No token is accepted with a larger probability."""

RECORDED_TEXT = TextModel(mean={}, other=0.5)
"""For requests that draw from a recording. Every class draws from all of it; a single request may draw mostly
from its easier or its harder part."""


@dataclass(frozen=True, slots=True)
class RecordedChildren:
    """Draws sets of sibling probabilities from a recording; acceptance follows its reliability curve."""

    best: FloatArray  # [k] claimed probability of the best child, ascending
    second_share: float  # mean share of the rest that the second child gets
    factors: FloatArray  # [bins]: how many times as often as claimed tokens were accepted, per bin of q

    def children(
        self, rng: np.random.Generator, difficulty: FloatArray, bias: FloatArray, beams: int, count: int
    ) -> tuple[FloatArray, FloatArray]:
        """See ChildSource. A request's difficulty picks its part of the recorded distribution; 0.5 picks all
        of it."""
        n, ease = len(difficulty), difficulty[:, None]
        place = rng.beta(2 * ease, 2 * (1 - ease), (n, beams)) * len(self.best)
        q1 = self.best[np.minimum(place.astype(np.int64), len(self.best) - 1)]
        shares = self.second_share * (1 - self.second_share) ** np.arange(count - 1)
        rest = np.minimum((1 - q1)[:, :, None] * shares, q1[:, :, None])
        q = np.maximum(np.concatenate([q1[:, :, None], rest], axis=2), 1e-6)
        p = np.minimum(self.factors[bin_of(q)] * q, MOST)
        return q, p / np.maximum(1.0, p.sum(axis=2, keepdims=True))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What recordings say of drafts and of the host."""

    children: RecordedChildren
    slowdown: float  # times that iterations took what a latency model says of them
    prefills: ForwardCost | None  # of forwards of prompts alone, where nothing slows them down
    mixed: bool  # whether prompts shared forwards with verification


def load_children(path: Path) -> RecordedChildren:
    """Builds the source from a recording. Raises ValueError when no candidate of it was verified."""
    candidates = _Candidates()
    for item in read_recording(path):
        candidates.add(item)
    return candidates.children(str(path))


def load_recorded(paths: Sequence[Path], latency: Latency) -> Recorded:
    """What the recordings of one engine, or of several alike, say together. They are read once: they can be
    larger than memory.

    The slowdown, of replicas that share a host or beside other programs, is the median of cycles without
    prefills. Raises ValueError where there are none, or where no candidate was verified."""
    candidates, ratios, prefills = _Candidates(), list[float](), list[RecordedPrefill]()
    mixed = False
    for event in chain.from_iterable(map(read_events, paths)):
        if isinstance(event, RecordedPrefill):
            prefills.append(event)
        elif isinstance(event, RecordedIteration):
            candidates.add(event)
            mixed |= event.outcome.prefill_tokens > 0
            if not event.outcome.prefilled:
                ratios.append(event.outcome.cycle_s / _said_s(event, latency))
    where = ", ".join(map(str, paths))
    if not ratios:
        raise ValueError(f"no iteration without prefills in {where}: record while requests are served")
    slowdown = float(np.median(ratios))
    cost = prefill_cost(prefills, latency, slowdown)
    return Recorded(candidates.children(where), slowdown, cost, mixed)


@dataclass(slots=True)
class _Candidates:
    """Gathers what was claimed of candidates, and what they were worth."""

    calibrator: Calibrator = field(default_factory=Calibrator)
    best: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)  # over what the best leaves

    def add(self, item: RecordedIteration) -> None:
        trees, running = item.trees, item.plan.running
        if not trees.n_nodes:
            return
        tests, classes = find_tested(item.outcome), ("all",) * len(running)
        q = claimed_probability(trees)
        self.calibrator.observe(q[tests.node], tests.row, tests.accepted, running.rids, classes)
        for r in range(trees.n_rows):
            own = slice(int(trees.row_start[r]), int(trees.row_start[r + 1]))
            first = np.sort(q[own][trees.depth[own] == 1])[::-1]
            if len(first):
                self.best.append(float(first[0]))
            if len(first) > 1 and first[0] < 1:
                self.second.append(float(first[1] / (1 - first[0])))

    def children(self, where: str) -> RecordedChildren:
        """Raises ValueError."""
        factors = self.calibrator.factors()
        if not self.best or not len(factors):
            raise ValueError(f"no candidate was verified in {where}: record while speculation is on")
        share = float(np.clip(np.mean(self.second), 0.05, 0.95)) if self.second else 0.5
        return RecordedChildren(np.sort(np.array(self.best)), share, factors[0])


def _said_s(item: RecordedIteration, latency: Latency) -> float:
    """How long ``latency`` says that an iteration takes."""
    plan, running = item.plan, item.plan.running
    context = Context(float(running.context_tokens.sum()), len(running))
    steps, tokens = item.trees.draft_steps, item.selection.verify_tokens
    return latency.iteration_s(
        plan.drafting_rows, steps, plan.draft.width, tokens, context, plan.draft_context
    )


def prefill_cost(
    prefills: Sequence[RecordedPrefill], latency: Latency, slowdown: float
) -> ForwardCost | None:
    """What these prefills would take if nothing slowed them down; None if there are none. They need a cost of
    their own: they are larger than any verification, and most of their tokens need no logits."""
    first_s = (latency.verify_s(n) + latency.draft_step_s(n) for n in (1.0, LearnedPrefills.FAR))
    learned, cost = LearnedPrefills(*first_s), None
    for prefill in prefills:
        learned.observe(prefill.tokens, prefill.seconds / slowdown)
        cost = learned.cost
    return cost

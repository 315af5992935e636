"""Trees recorded from the engine as a source of children: claimed probabilities and what they were worth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adaserve.scheduler.acceptance import find_tested
from adaserve.scheduler.calibration import Calibrator, bin_of, claimed_probability
from adaserve.scheduler.interface import Context, FloatArray
from adaserve.scheduler.latency import ForwardCost, Latency
from adaserve.scheduler.pressure import LearnedPrefills
from adaserve.scheduler.replay import read_prefills, read_recording
from adaserve.scheduler.simulator.workload import TextModel

MOST = 0.999
"""Of a true acceptance."""

RECORDED_TEXT = TextModel(mean={}, other=0.5)
"""Of requests that draw from a recording: all classes from the whole of it, some from its easier part."""


@dataclass(frozen=True, slots=True)
class RecordedChildren:
    """Sets of sibling probabilities drawn from a recording; acceptance follows its reliability curve."""

    best: FloatArray  # [k] claimed probability of the best child, ascending
    second_share: float  # mean share of the rest that the second child gets
    factors: FloatArray  # [bins]: how many times as often as claimed tokens were accepted, per bin of q

    def children(
        self, rng: np.random.Generator, difficulty: FloatArray, bias: FloatArray, beams: int, count: int
    ) -> tuple[FloatArray, FloatArray]:
        """See ChildSource: a request's difficulty picks its part of the recorded distribution, which for 0.5
        is the whole of it."""
        n, ease = len(difficulty), difficulty[:, None]
        place = rng.beta(2 * ease, 2 * (1 - ease), (n, beams)) * len(self.best)
        q1 = self.best[np.minimum(place.astype(np.int64), len(self.best) - 1)]
        shares = self.second_share * (1 - self.second_share) ** np.arange(count - 1)
        rest = np.minimum((1 - q1)[:, :, None] * shares, q1[:, :, None])
        q = np.maximum(np.concatenate([q1[:, :, None], rest], axis=2), 1e-6)
        p = np.minimum(self.factors[bin_of(q)] * q, MOST)
        return q, p / np.maximum(1.0, p.sum(axis=2, keepdims=True))


def load_children(path: Path) -> RecordedChildren:
    """Builds the source from a recording. Raises ValueError when no candidate of it was verified."""
    calibrator, best, second = Calibrator(), [], []
    for item in read_recording(path):
        trees, running = item.trees, item.plan.running
        if not trees.n_nodes:
            continue
        tests, classes = find_tested(item.outcome), ("all",) * len(running)
        q = claimed_probability(trees)
        calibrator.observe(q[tests.node], tests.row, tests.accepted, running.rids, classes)
        for r in range(trees.n_rows):
            own = slice(int(trees.row_start[r]), int(trees.row_start[r + 1]))
            first = np.sort(q[own][trees.depth[own] == 1])[::-1]
            if len(first):
                best.append(float(first[0]))
            if len(first) > 1 and first[0] < 1:
                second.append(float(first[1] / (1 - first[0])))
    factors = calibrator.factors()
    if not best or not len(factors):
        raise ValueError(f"{path} holds no verified candidates; record while speculation is on")
    share = float(np.clip(np.mean(second), 0.05, 0.95)) if second else 0.5
    return RecordedChildren(np.sort(np.array(best)), share, factors[0])


def recorded_slowdown(path: Path, latency: Latency) -> float:
    """How many times as long the iterations of a recording took as ``latency`` says of them: replicas that
    share a host, or other programs. The median of cycles without prefills. Raises ValueError when it holds
    none."""
    ratios = []
    for item in read_recording(path):
        if item.outcome.prefilled:
            continue
        plan, running = item.plan, item.plan.running
        context = Context(float(running.context_tokens.sum()), len(running))
        steps, tokens = item.trees.draft_steps, item.selection.verify_tokens
        said_s = latency.iteration_s(
            plan.drafting_rows, steps, plan.draft.width, tokens, context, plan.draft_context
        )
        ratios.append(item.outcome.cycle_s / said_s)
    if not ratios:
        raise ValueError(f"{path} holds no iteration without prefills; record while requests are served")
    return float(np.median(ratios))


def recorded_prefills(path: Path, latency: Latency, slowdown: float) -> ForwardCost | None:
    """What the recorded forwards that read prompts would take where nothing slows them down, seconds; None
    where none was recorded. They are larger than what is known of verifications, and compute no logits of
    most tokens."""
    first_s = (latency.verify_s(n) + latency.draft_step_s(n) for n in (1.0, LearnedPrefills.FAR))
    learned, cost = LearnedPrefills(*first_s), None
    for prefill in read_prefills(path):
        learned.observe(prefill.tokens, prefill.seconds / slowdown)
        cost = learned.cost
    return cost

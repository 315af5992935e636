"""Candidate trees without a model: what a draft claims of each node is drawn, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from scipy.stats import beta

from adaserve.scheduler.interface import (
    BoolArray,
    CandidateTrees,
    DraftPlan,
    FloatArray,
    IntArray,
)
from adaserve.scheduler.simulator.workload import TextModel, drawn_difficulty

KeepDrafting = Callable[[int, FloatArray], bool]


class ChildSource(Protocol):
    """Draws the best children of live beams."""

    def children(
        self, rng: np.random.Generator, difficulty: FloatArray, bias: FloatArray, beams: int, count: int
    ) -> tuple[FloatArray, FloatArray]:
        """Claimed q and true acceptance p of the ``count`` best children, [n, beams, count] each."""
        ...


MEANS, QUANTILES = 100, 1024
"""Rows of the table of distributions, and entries of each."""

CONCENTRATION = 1.6
"""a + b of the distribution of the best child: the less, the more of them are sure or hopeless."""

SIBLING_SHARE = 0.55
"""Of what the likelier children leave, that the next one claims."""

DRAWS = 4000
"""Requests over which the acceptance of chains is averaged."""


@cache
def _best_table() -> FloatArray:
    """Quantiles of Beta distributions by mean, [100 * 1024]: drawing from a table is far cheaper."""
    means = (np.arange(MEANS) + 0.5) / MEANS
    quantiles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    a, b = CONCENTRATION * means[:, None], CONCENTRATION * (1 - means[:, None])
    table: FloatArray = np.clip(beta.ppf(quantiles[None, :], a, b), 0.05, 0.999)
    return table.ravel()


@cache
def _sibling_table(count: int) -> FloatArray:
    """Claimed q of the ``count`` best children for every entry of the first table, [100 * 1024, count]."""
    best = _best_table()[:, None]
    shares = SIBLING_SHARE * (1 - SIBLING_SHARE) ** np.arange(count - 1)
    rest = np.minimum((1 - best) * shares, best * 0.98 ** np.arange(1, count))
    table: FloatArray = np.concatenate([best, rest], axis=1)
    return table


@cache
def _odds_table(miscalibration: float) -> FloatArray:
    """Odds that the best child is accepted, before the request's bias, for every entry; [100 * 1024]."""
    best = _best_table()
    odds: FloatArray = (best / (1 - best)) ** (1 - miscalibration)
    return odds


@dataclass(frozen=True, slots=True)
class SyntheticChildren:
    """Best child ~ Beta around the request's difficulty; the rest share what is left geometrically.

    ``miscalibration`` 0: the claimed q is right up to the request's bias. Above 0 the draft is
    over-confident (logit p = (1 - miscalibration) logit q + bias), below 0 under-confident.
    """

    miscalibration: float = 0.15

    def children(
        self, rng: np.random.Generator, difficulty: FloatArray, bias: FloatArray, beams: int, count: int
    ) -> tuple[FloatArray, FloatArray]:
        """See ChildSource."""
        cell = np.minimum((difficulty * MEANS).astype(np.int64), MEANS - 1) * QUANTILES
        drawn = cell[:, None] + rng.integers(0, QUANTILES, (len(difficulty), beams))
        q = _sibling_table(count).take(drawn, axis=0)
        odds = _odds_table(self.miscalibration).take(drawn) * np.exp(bias)[:, None]
        p = q / ((1 + odds) * (1 - q[:, :, 0]))[:, :, None]  # siblings share what the best one leaves
        p[:, :, 0] = odds / (1 + odds)
        return q, p


def acceptance_of_chains(source: ChildSource, text: TextModel, length: int) -> float:
    """Tokens per verification of chains of ``length``, bonus included, over requests of a class that ``text``
    does not name."""
    rng = np.random.default_rng(0)
    difficulty, bias = drawn_difficulty(text, [""] * DRAWS, rng)
    reach, tokens = np.ones(DRAWS), np.ones(DRAWS)
    for _ in range(length):
        _, p = source.children(rng, difficulty, bias, 1, 2)
        reach = reach * p[:, 0, 0]
        tokens = tokens + reach
    return float(tokens.mean())


@dataclass(frozen=True, slots=True)
class Drafted:
    """Trees of the n rows that are drafted for, all with the same levels, and what the policy must not
    see."""

    trees: CandidateTrees
    acceptance: FloatArray  # [n, M]: true P(accepted | parent accepted)
    parent: IntArray  # [n, M], -1 = root
    levels: tuple[slice, ...]  # columns of each depth
    luck: FloatArray  # [n, levels]: uniform draws that decide each level, whatever will be kept

    def path_acceptance(self) -> FloatArray:
        """True probability that each node and all above it are accepted, [n * M]."""
        n = len(self.acceptance)
        reach = self.acceptance.copy()
        for columns in self.levels[1:]:
            reach[:, columns] *= np.take_along_axis(reach, self.parent[:, columns], axis=1)
        return reach.reshape(n * self.acceptance.shape[1])

    def fate(self, keep: BoolArray | None = None) -> BoolArray:
        """Accepted nodes when those in ``keep`` [n * M] are verified (None = all), [n * M].

        At each node one child or none is drawn (sample-then-match, lossless): child c with its probability.
        The path ends where the drawn child was not kept.
        """
        n, width = self.acceptance.shape
        kept = np.ones((n, width), np.bool_) if keep is None else keep.reshape(n, width)
        accepted = np.zeros((n, width), np.bool_)
        current, rows = np.full(n, -1), np.arange(n)
        for level, columns in enumerate(self.levels):
            child = self.parent[rows, columns] == current[rows, None]
            reach = np.cumsum(np.where(child, self.acceptance[rows, columns], 0.0), axis=1)
            drawn = reach > self.luck[rows, level, None]
            at = columns.start + np.argmax(drawn, axis=1)
            hit = drawn[:, -1] & kept[rows, at]
            rows, at = rows[hit], at[hit]
            if not len(rows):
                break
            accepted[rows, at] = True
            current[rows] = at
        return accepted.reshape(-1)


class TreeSampler:
    """Grows beams (or fixed trees) level by level."""

    def __init__(self, source: ChildSource, rng: np.random.Generator) -> None:
        self.source = source
        self._rng = rng

    def draft(
        self, draft: DraftPlan, difficulty: FloatArray, bias: FloatArray, keep_drafting: KeepDrafting
    ) -> Drafted:
        """Beam search of draft.width (Algorithm 2 line 8), or draft.branching children per beam."""
        batch = len(difficulty)
        rows = np.arange(batch) if draft.rows is None else np.flatnonzero(draft.rows)
        difficulty, bias, n = difficulty[rows], bias[rows], len(rows)
        parents, logs, accepts = [], [], []
        frontier, columns, offset = np.zeros((n, 1)), np.full((n, 1), -1), 0
        for step in range(draft.depth):
            count = draft.width if draft.branching is None else draft.branching[step]
            q, p = self.source.children(self._rng, difficulty, bias, frontier.shape[1], count)
            path = (frontier[:, :, None] + np.log(q)).reshape(n, -1)
            above = np.repeat(columns, count, axis=1)
            p = p.reshape(n, -1)
            if draft.branching is None and path.shape[1] > draft.width:
                best = np.argsort(-path, axis=1)[:, : draft.width]
                best += (np.arange(n) * path.shape[1])[:, None]
                path, above, p = path.ravel()[best], above.ravel()[best], p.ravel()[best]
            parents.append(above)
            logs.append(path)
            accepts.append(p)
            frontier, columns = path, np.arange(offset, offset + path.shape[1])[None, :].repeat(n, axis=0)
            offset += path.shape[1]
            if step + 1 < draft.depth:
                asked = np.full((batch, path.shape[1]), -np.inf)
                asked[rows] = path
                if not keep_drafting(step + 1, asked):
                    break
        luck = self._rng.random((n, len(parents)))
        return _assemble(batch, rows, parents, logs, accepts, luck)


def _assemble(
    batch: int,
    rows: IntArray,
    parents: list[IntArray],
    logs: list[FloatArray],
    accepts: list[FloatArray],
    luck: FloatArray,
) -> Drafted:
    """Trees of the ``rows`` [n] of a batch."""
    widths = [x.shape[1] for x in parents]
    ends = np.cumsum(widths)
    n, total = len(rows), int(ends[-1])
    nodes = np.zeros(batch, np.int64)
    nodes[rows] = total
    levels = tuple(slice(int(e) - w, int(e)) for e, w in zip(ends, widths, strict=True))
    depth = np.repeat(np.arange(1, len(widths) + 1), widths)
    parent = np.concatenate(parents, axis=1)
    trees = CandidateTrees(
        row_start=np.concatenate([[0], np.cumsum(nodes)]),
        token=np.zeros(n * total, np.int64),
        parent=parent.ravel(),
        depth=np.tile(depth, n),
        logprob=np.concatenate(logs, axis=1).ravel(),
    )
    return Drafted(trees, np.concatenate(accepts, axis=1), parent, levels, luck)

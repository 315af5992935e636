"""TurboSpec: closed-loop choice of the chain length k by expected goodput.

With a draft model k is how much is proposed. With prompt lookup (offered candidates and no draft model) the
proposal is fixed and costs nothing, and k is how much of it is verified.
"""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.acceptance import expected_accept_length
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import (
    BoolArray,
    CandidateTrees,
    DraftPlan,
    FloatArray,
    IntArray,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import and_root, best_anywhere, path_probability


class TurboSpecPolicy(BasePolicy):
    """k* = argmax goodput(k), k = 0 included (Listing 2 never tries it), one k for the whole batch.

    Of offered trees the first chain counts, since the paper's proposals are chains.

    acc is the global rate of tested proposals. While k* = 0 it is not observed, so every
    ``turbo_probe_every`` iterations one chain of 1 is drafted, so that speculation comes back by itself.
    """

    def __init__(self, name: str, config: PolicyConfig) -> None:
        super().__init__(name, config)
        self._idle = 0
        self._threshold = float("inf")  # batch size above which draft prefill is skipped
        self._skipped = 0

    def goodput(self, running: RunningBatch, cap: IntArray) -> FloatArray:
        """Expected tokens per second of k = 0..k_max, [k_max + 1] (TurboSpec section 4, Eq. 1).

        Offered candidates may reach deeper than draft steps go.
        """
        n, context = len(running), self.context(running)
        deepest = self.config.d_max if self.config.drafts else 0
        longest = np.minimum(cap, np.maximum(_chains(running), deepest))
        ks = np.arange(min(self.config.turbo_k_max, int(longest.max())) + 1)
        lengths = np.minimum(longest[None, :], ks[:, None])
        tokens = expected_accept_length(self.level_rate.value, lengths).sum(axis=1)
        verify = self.costs.verify_s((n + lengths.sum(axis=1)).astype(np.float64), context)
        read = self._draft_context(running, self._fixed_window(n))
        draft = np.array([self.costs.draft_s(n, min(k, deepest), 1, read) for k in ks.tolist()])
        out: FloatArray = tokens / (draft + verify + self.costs.other_s())
        return out

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """A chain of k*; a probe of 1 now and then while k* is 0."""
        n, goodput = len(running), self.goodput(running, cap)
        if len(goodput) == 1:  # there is no choice
            return Shape(DraftPlan(0), deepest=0)
        best = int(np.argmax(goodput))
        if best > 0:
            self._idle = 0
            return self._chain(n, best)
        if self._threshold == float("inf"):
            self._threshold = n
        underway = running.underway
        self._idle = 0 if underway is not None and underway.depth else self._idle + 1
        if self._idle >= self.config.turbo_probe_every:
            if underway is None:  # else nothing is drafted by this plan, and the next one asks again
                self._idle = 0
            return self._chain(n, 1)
        return Shape(DraftPlan(0), deepest=0)

    def _chain(self, n: int, k: int) -> Shape:
        return Shape(DraftPlan(k), budget=n * (1 + k), deepest=k)

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """The first k tokens of every chain."""
        f = np.where(_on_first_chain(trees), path_probability(trees), 0.0)
        return best_anywhere(trees, f, plan.budget, plan.cap)

    def wants_draft_prefill(self, n_running: int) -> bool:
        """Whether a new request should get draft KV (TurboSpec section 5.3; Listing 1 inverts the test).

        With ``turbo_skip_prefill`` it is skipped above the batch size at which k* first was 0. Such a
        request can never speculate (drive it with ``max_depth`` 0). Every ``turbo_reset_steps`` skips
        the threshold is lifted.
        """
        if not self.config.turbo_skip_prefill or n_running <= self._threshold:
            return True
        self._skipped += 1
        if self._skipped >= self.config.turbo_reset_steps:
            self._skipped, self._threshold = 0, float("inf")
        return False


def _on_first_chain(trees: CandidateTrees) -> BoolArray:
    """Nodes that begin their level in their row, below one that does, [m]."""
    first, parent = trees.begins_level.copy(), trees.above
    for _ in range(int(trees.depth.max(initial=1)) - 1):
        first &= and_root(first, True).take(parent)
    return first


def _chains(running: RunningBatch) -> IntArray:
    """Length of every row's first offered chain, [n]."""
    if (trees := running.offered) is None:
        return np.zeros(len(running), np.int64)
    lengths: IntArray = np.bincount(trees.row[_on_first_chain(trees)], minlength=len(running))
    return lengths

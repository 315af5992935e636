"""Speculation at long contexts: on where it pays and off where it does not, by price alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sched_factories import beam_trees, outcome, running

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import Context, IterationPlan
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.policies.base import BasePolicy

ACCEPTANCE, NOISE = 0.5, 0.02
MEAN_NOISE = 1.0 + NOISE * (2 / np.pi) ** 0.5  # that of the absolute value
READS_ONCE = LatencyModel(
    draft=ForwardCost(4e-4, per_token_s=1e-5, per_context_s=1e-8),
    verify=ForwardCost(1.2e-2, per_token_s=2e-4, per_context_s=4e-7, per_pair_s=4e-9),
    overhead_s=1e-3,
)
"""Verification fetches the KV cache once for all tokens of a request."""
READS_AGAIN = replace(
    READS_ONCE, verify=ForwardCost(1.2e-2, per_token_s=2e-4, per_context_s=0.0, per_pair_s=4e-7)
)
"""Verification reads the KV cache once for each token."""


class Host:
    """Serves n requests on a host that takes what ``truth`` says; drafts are accepted at random."""

    def __init__(self, policy: BasePolicy, truth: LatencyModel, n: int) -> None:
        self.policy, self.truth, self.n = policy, truth, n
        self.rng = np.random.default_rng(0)
        self.tokens = self.seconds = 0.0

    def serve(self, length: int, iterations: int) -> list[IterationPlan]:
        """At contexts of ``length`` tokens each."""
        return [self._iterate(length) for _ in range(iterations)]

    def _iterate(self, length: int) -> IterationPlan:
        n, context = self.n, Context(float(self.n * length), self.n)
        plan = self.policy.plan(running(n, context_tokens=length, remaining_tokens=10_000), 1.0)
        trees = beam_trees(n, plan.draft.depth, plan.draft.width)
        selection = self.policy.select(plan, trees)
        accepted = np.zeros(trees.n_nodes, np.bool_)
        for r in range(n):
            path, first = -1, int(trees.row_start[r])
            for node in range(first, int(trees.row_start[r + 1])):
                below = trees.parent[node] == path and selection.keep[node]
                if below and self.rng.random() < ACCEPTANCE:
                    accepted[node], path = True, node - first
        draft_s = self.truth.draft_s(n, trees.draft_steps, plan.draft.width, context)
        verify_s = self.truth.verify_s(selection.verify_tokens, context) * (
            1 + abs(self.rng.normal(0, NOISE))
        )
        total_s = draft_s + verify_s + self.truth.overhead_s
        done = outcome(plan, trees, selection, accepted, draft_s=draft_s, verify_s=verify_s)
        self.policy.observe(replace(done, total_s=total_s, since_last_s=total_s))
        self.tokens += float(done.new_tokens.sum())
        self.seconds += total_s
        return plan

    def depth(self, length: int) -> float:
        """Mean depth once the costs are known."""
        self.serve(length, 300)
        return float(np.mean([p.draft.depth for p in self.serve(length, 200)]))

    def speedup(self, length: int) -> float:
        """Tokens per second over those of plain decoding, once the costs are known."""
        self.serve(length, 300)
        self.tokens = self.seconds = 0.0
        self.serve(length, 300)
        plain_s = self.truth.iteration_s(self.n, 0, 1, self.n, Context(float(self.n * length), self.n))
        return self.tokens / self.seconds * plain_s * MEAN_NOISE / self.n


def priced(start: LatencyModel) -> BasePolicy:
    policy = build_policy("priced", PolicyConfig(latency=start))
    assert isinstance(policy, BasePolicy)
    return policy


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("start", [READS_ONCE, READS_AGAIN])
def test_it_stops_where_every_verified_token_reads_the_cache_again(n: int, start: LatencyModel) -> None:
    """Whatever was believed at first; and it is back where contexts are short again."""
    host = Host(priced(start), READS_AGAIN, n)
    assert host.depth(256) > 1.0
    assert host.depth(65_536) < 0.2
    assert host.depth(256) > 1.0


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("start", [READS_ONCE, READS_AGAIN])
def test_it_pays_more_where_the_cache_is_read_once(n: int, start: LatencyModel) -> None:
    """A verified token costs next to nothing there, beside what reading the cache costs anyway."""
    host = Host(priced(start), READS_ONCE, n)
    short = host.speedup(256)
    assert host.speedup(32_768) > 1.1 * short > 1.1


@pytest.mark.parametrize("start", [READS_ONCE, READS_AGAIN])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("length", [8192, 65_536])
def test_it_is_never_slower_than_plain_decoding(start: LatencyModel, n: int, length: int) -> None:
    assert Host(priced(start), READS_AGAIN, n).speedup(length) > 0.98

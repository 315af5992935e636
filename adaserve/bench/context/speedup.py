"""When speculation pays off at long contexts (MagicDec, sections 3.1 and 3.2), by the cost of forwards.

speedup = Omega T_T / (k T_D + T_V), with Omega the expected tokens of a chain of k, bonus included, T_T a
plain step, T_D a draft step and T_V the verification of k + 1 tokens per request, all for n requests with
equally long contexts. The amount that a draft with a window reads does not grow, so beyond some length,
S_inflection, speculation gains more with every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adaserve.scheduler.acceptance import expected_accept_length
from adaserve.scheduler.costs.latency import StepCost, forward_s
from adaserve.scheduler.interface import Context, FloatArray

LENGTHS: FloatArray = np.round(64 * 2 ** (np.arange(0, 57) / 4))
"""Lengths among which S_inflection is looked for: 64 tokens to a million, four per doubling."""

SINKS = 4
"""First tokens of a context that a draft with a window reads as well."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """One way to draft chains: with which model, how well, and how much of its context it reads."""

    name: str
    cost: StepCost  # of the drafting model's forwards; the target's own if it drafts for itself
    acceptance: float  # probability that a drafted token is accepted if all before it were
    window: int = 0  # recent tokens that a step reads, besides SINKS; 0 = all

    def reads(self, length: float) -> float:
        """Cached tokens of one request that a step reads."""
        return min(length, self.window + SINKS) if self.window else length


@dataclass(frozen=True, slots=True)
class Speedup:
    """What trees of ``depth`` levels give. Times in seconds, all requests together."""

    depth: int
    plain_s: float  # T_T
    draft_step_s: float  # T_D
    verify_s: float  # T_V
    tokens: float  # Omega, per request
    width: int = 1  # tokens at each level, one of which is followed; 1 = a chain

    @property
    def ratio(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.tokens * self.plain_s / (self.depth * self.draft_step_s + self.verify_s)


def speedup(target: StepCost, drafting: Drafting, n: int, length: float, depth: int) -> Speedup:
    """What chains of ``depth`` give n requests with ``length`` cached tokens each."""
    context = Context(n * length, n)
    plain, verify = forward_s(target, np.array([n, n * (depth + 1)], np.float64), context).tolist()
    read = Context(n * drafting.reads(length), n)
    step = float(forward_s(drafting.cost, np.array([n], np.float64), read)[0])
    return Speedup(depth, plain, step, verify, float(expected_accept_length(drafting.acceptance, depth)))


def best(target: StepCost, drafting: Drafting, n: int, length: float, deepest: int = 8) -> Speedup:
    """The same with the depth, from 1 to ``deepest``, that gives most."""
    every = (speedup(target, drafting, n, length, depth) for depth in range(1, deepest + 1))
    return max(every, key=lambda s: s.ratio)


def rises(ratios: Sequence[float]) -> bool:
    """Whether the speedup grows from each number of requests to the next, larger one."""
    return all(a < b for a, b in pairwise(ratios))


def inflection(
    target: StepCost, drafting: Drafting, batches: Sequence[int], deepest: int = 8
) -> float | None:
    """S_inflection: the shortest of ``LENGTHS`` from which on speedups grow with the number of requests over
    all of ``batches``; None = they never do, or there is only one."""
    found, sizes = None, sorted(set(batches))
    for length in LENGTHS[::-1].tolist() if len(sizes) > 1 else ():
        if not rises([best(target, drafting, n, length, deepest).ratio for n in sizes]):
            break
        found = length
    return found

"""Selection on the device: the rules of ``adaserve.scheduler.selection`` as torch functions.

Trees stand in a grid [n, k], padded: row r has ``size[r]`` candidates, parents first. The results are
those of the numpy functions, ties included (the same 44 bits of a probability, then the position), and
nothing here waits for the device: what numpy branches on is written as ``torch.where``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaserve.scheduler.selection import INDEX_MASK

N_BINS = 20
CEILING = 0.985
"""As in ``adaserve.scheduler.calibration``; a test compares them."""


@dataclass(frozen=True, slots=True)
class TreeGrid:
    """Candidate trees of n rows on the device."""

    parent: Tensor  # int64 [n, k]: index inside the row, -1 = child of the root
    depth: Tensor  # int64 [n, k], 1-based
    logprob: Tensor  # float64 [n, k]: log path probability
    size: Tensor  # int64 [n]
    deepest: int  # no node is deeper

    @property
    def valid(self) -> Tensor:
        """bool [n, k]: entries that are candidates."""
        return torch.arange(self.parent.shape[1], device=self.size.device) < self.size[:, None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A selection on the device; kept nodes of a row form a tree with its root."""

    keep: Tensor  # bool [n, k]
    counts: Tensor  # int64 [n]
    slo_counts: Tensor  # int64 [n]
    expected: Tensor  # float64 [n]: 1 + sum of the kept nodes' path probabilities

    @staticmethod
    def nothing(trees: TreeGrid) -> Kept:
        """Keeps no candidate of ``trees``."""
        zero = torch.zeros_like(trees.size)
        return Kept(torch.zeros_like(trees.parent, dtype=torch.bool), zero, zero, 1.0 + zero.double())


@dataclass(frozen=True, slots=True)
class RankedGrid:
    """Each row's candidates, best first. ``key`` 0 = padding; ``index`` [n, k] = place in the row."""

    key: Tensor  # int64 [n, k]
    value: Tensor  # float64 [n, k]
    index: Tensor  # int64 [n, k]
    available: Tensor  # int64 [n]: candidates with a value above 0


def path_probability(trees: TreeGrid) -> Tensor:
    """exp(logprob) [n, k]; NaN counts as 0, above 1 as 1."""
    return trees.logprob.exp().nan_to_num(nan=0.0, posinf=1.0).clamp(max=1.0)


def calibrated_probability(trees: TreeGrid, factor: Tensor) -> Tensor:
    """f(v) as ``Calibrator.path_values`` gives it; ``factor`` float64 [n, N_BINS] = k_bin * k_req."""
    above = _at_parent(trees.logprob, trees.parent, 0.0)
    q = (trees.logprob - above).clamp(max=0.0).exp().nan_to_num(nan=0.0)
    bins = (q * N_BINS).long().clamp(max=N_BINS - 1)
    f = (q * factor.gather(1, bins)).clamp(max=CEILING)
    up = trees.parent
    for _ in range(max(0, trees.deepest - 1).bit_length()):
        f = f * _at_parent(f, up, 1.0)
        up = _at_parent(up, up, -1)
    return f


def rank(trees: TreeGrid, f: Tensor, cap: Tensor | None = None) -> RankedGrid:
    """Sorts each row by ``f`` [n, k], falling, parents first among equals; ``cap`` [n]: deepest node."""
    n, k = f.shape
    usable = trees.valid if cap is None else trees.valid & (trees.depth <= cap[:, None])
    f = monotone(trees, torch.where(usable, f, 0.0))
    low = INDEX_MASK - torch.arange(n * k, device=f.device).view(n, k)
    key = torch.where(trees.valid, (_bits(f) & ~INDEX_MASK) | low, 0)
    key = key.sort(dim=1, descending=True).values
    value = _value(key)
    start = k * torch.arange(n, device=f.device)[:, None]
    index = (INDEX_MASK - (key & INDEX_MASK) - start).clamp(0, max(0, k - 1))
    return RankedGrid(key, value, index, (value > 0).sum(dim=1))


def two_phase(
    trees: TreeGrid,
    f: Tensor,
    need: Tensor,
    depth: int,
    budget: int,
    n_max: int | None,
    cap: Tensor | None = None,
    *,
    slo_phase: bool = True,
) -> Kept:
    """AdaServe's selection (Algorithm 2 lines 8-22). ``need`` float64 [n]; ``budget`` is B with the roots."""
    ranked = rank(trees, f, cap)
    nodes = budget - f.shape[0]
    first = torch.zeros_like(ranked.available)
    if slo_phase:
        first = slo_counts(ranked, need, depth + 1.0, n_max, nodes)
    return take_prefix(ranked, best_counts(ranked, first, nodes), first)


def equal_share(trees: TreeGrid, f: Tensor, budget: int, cap: Tensor | None = None) -> Kept:
    """EqualGreedy (AdaServe v1 ablation): every row keeps its best floor(B / n) - 1 nodes."""
    ranked = rank(trees, f, cap)
    counts = ranked.available.clamp(max=max(0, budget // f.shape[0] - 1))
    return take_prefix(ranked, counts, torch.zeros_like(counts))


def priced(
    trees: TreeGrid, f: Tensor, weight: Tensor, seconds: Tensor, most: int, cap: Tensor | None = None
) -> Kept:
    """The prefix of all nodes by falling weight x f with the best value per second (``priced``'s rule).

    ``f`` [n, k] never rises along a path; ``weight`` float64 [n]; ``seconds`` float64 [most + 1]: predicted
    time of the iteration when 0..most nodes are verified.
    """
    n, k = f.shape
    usable = trees.valid if cap is None else trees.valid & (trees.depth <= cap[:, None])
    f = torch.where(usable, f, 0.0)
    value = torch.where(trees.valid, f * weight[:, None], -1.0).flatten()
    order = value.argsort(descending=True, stable=True)  # of equals the first: parents before children
    falling = value[order][:most]
    gain = torch.cat([falling.new_zeros(1), falling.cumsum(0)])
    rate = (weight.sum() + gain) / seconds
    place = torch.arange(n * k, device=f.device)
    steps = torch.arange(most + 1, device=f.device)
    rate = torch.where(steps <= (falling > 0).sum(), rate, -torch.inf)
    keep = torch.zeros(n * k, dtype=torch.bool, device=f.device).scatter(0, order, place < rate.argmax())
    keep = keep.view(n, k)
    counts = keep.sum(dim=1)
    return Kept(keep, counts, torch.zeros_like(counts), 1.0 + (f * keep).sum(dim=1))


def slo_counts(ranked: RankedGrid, need: Tensor, reach: float, n_max: int | None, budget: int) -> Tensor:
    """SLO phase: nodes per row, neediest row first, ``budget`` nodes in all; int64 [n]."""
    k = ranked.value.shape[1]
    if k == 0 or budget <= 0:
        return torch.zeros_like(ranked.available)
    target = need.clamp(max=reach) - 1.0
    behind = target > 0
    most = k if n_max is None else min(n_max, k)
    # numpy shifts the rows' running sums for one bisection; the same shift keeps the same rounding.
    offset = (k + 2.0) * (behind.cumsum(0) - 1).double()
    gathered = ranked.value[:, :most].cumsum(dim=1) + offset[:, None]
    goal = target.clamp(max=k + 1.0) + (offset - 1e-9)
    reached = (gathered < goal[:, None]).sum(dim=1) + 1
    wanted = torch.where(behind, reached.clamp(max=most).minimum(ranked.available), 0)
    order = need.neg().argsort(stable=True)
    sorted_ = wanted[order]
    granted = sorted_.minimum((budget - (sorted_.cumsum(0) - sorted_)).clamp(min=0))
    return torch.zeros_like(wanted).scatter(0, order, granted)


def best_counts(ranked: RankedGrid, first: Tensor, nodes: int) -> Tensor:
    """Throughput phase: ``first`` [n] and the best leftovers anywhere, ``nodes`` in all; int64 [n]."""
    n, k = ranked.key.shape
    if k == 0 or nodes <= 0:
        return first
    left = nodes - first.sum()
    rest = ranked.available - first
    open_ = torch.arange(k, device=first.device) >= first[:, None]
    key = torch.where(open_, ranked.key, 0)
    falling = key.flatten().sort(descending=True).values
    threshold = falling.index_select(0, (left - 1).clamp(0, n * k - 1).view(1))
    some = first + ((key >= threshold) & open_).sum(dim=1)
    chosen = torch.where(rest.sum() <= left, ranked.available, some)
    return torch.where(left > 0, chosen, first)


def take_prefix(ranked: RankedGrid, counts: Tensor, slo: Tensor) -> Kept:
    """Keeps the first ``counts[r]`` ranked nodes of every row."""
    chosen = torch.arange(ranked.key.shape[1], device=counts.device) < counts[:, None]
    keep = torch.zeros_like(chosen).scatter(1, ranked.index, chosen & (ranked.key != 0))
    expected = 1.0 + (ranked.value * chosen).sum(dim=1)
    return Kept(keep, counts, slo, expected)


def _at_parent(values: Tensor, parent: Tensor, at_root: float) -> Tensor:
    """``values`` [n, k] of each node's parent; ``at_root`` where that is the root."""
    if values.shape[1] == 0:
        return values
    return torch.where(parent < 0, at_root, values.gather(1, parent.clamp(min=0))).to(values.dtype)


def monotone(trees: TreeGrid, f: Tensor) -> Tensor:
    """``f`` with every node at most the smallest on its path (pointer doubling)."""
    up = trees.parent
    for _ in range(trees.deepest.bit_length()):
        f = f.minimum(_at_parent(f, up, 1.0))
        up = _at_parent(up, up, -1)
    return f


def _bits(f: Tensor) -> Tensor:
    return f.contiguous().view(torch.int64)


def _value(key: Tensor) -> Tensor:
    return (key & ~INDEX_MASK).contiguous().view(torch.float64)

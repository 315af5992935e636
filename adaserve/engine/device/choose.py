"""Which policies select on the device, and how; the others select on the host from a copy of the trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve.engine.device import selection
from adaserve.engine.device.layout import to_device
from adaserve.engine.device.selection import Kept, TreeGrid
from adaserve.scheduler.interface import CandidateTrees, IterationPlan, Policy, Selection
from adaserve.scheduler.policies.base import BasePolicy
from adaserve.scheduler.policies.paper import AdaServePolicy
from adaserve.scheduler.policies.priced import PricedPolicy


@dataclass(frozen=True, slots=True)
class Choice:
    """What is verified. ``counts`` has reached the host: the one copy that an iteration waits for."""

    kept: Kept
    counts: np.ndarray  # int64 [n]
    on_host: Selection | None = None  # when the host selected
    learns_in_select: bool = False  # the policy's own ``select`` is still to be called, for what it learns


def choose(policy: Policy, plan: IterationPlan, trees: TreeGrid, nodes: int) -> Choice:
    """Selects from ``trees`` (``nodes`` in all), on the device where the policy's rule exists there."""
    method = policy.select
    owner, rule = getattr(method, "__self__", policy), getattr(method, "__func__", None)
    if rule in (AdaServePolicy.select, BasePolicy.select):
        kept = _paper(owner, plan, trees)
    elif rule is PricedPolicy.select:
        kept = _priced(owner, plan, trees, nodes)
    else:
        return _on_host(policy, plan, trees)
    return Choice(kept, kept.counts.cpu().numpy(), learns_in_select=rule is PricedPolicy.select)


def _paper(policy: Any, plan: IterationPlan, trees: TreeGrid) -> Kept:
    device = trees.size.device
    f = selection.path_probability(trees)
    cap = None if plan.cap is None else to_device(plan.cap, device)
    if getattr(policy, "equal", False):
        return selection.equal_share(trees, f, plan.budget, cap)
    paper = isinstance(policy, AdaServePolicy)
    return selection.two_phase(
        trees, f, to_device(plan.need, device), plan.depth, plan.budget, plan.n_max if paper else None, cap,
        slo_phase=paper and policy.slo_phase,
    )  # fmt: skip


def _priced(policy: Any, plan: IterationPlan, trees: TreeGrid, nodes: int) -> Kept:
    device = trees.size.device
    n, running = len(plan.running), plan.running
    if policy.config.calibrate:
        factor = policy.calibrator.batch_factors(running.rids, running.slo_class)
        f = selection.calibrated_probability(trees, to_device(factor, device))
    else:
        f = selection.monotone(trees, selection.path_probability(trees))
    weight = np.ones(n) if plan.weight is None else plan.weight
    most = max(0, min(plan.budget - n, nodes))
    depth = np.full(nodes, trees.deepest)
    same_depth = CandidateTrees(np.zeros(n + 1, np.int64), depth, depth, depth, np.zeros(nodes))
    seconds = policy.seconds(plan, same_depth, most)
    cap = None if plan.cap is None else to_device(plan.cap, device)
    return selection.priced(trees, f, to_device(weight, device), to_device(seconds, device), most, cap)


def _on_host(policy: Policy, plan: IterationPlan, trees: TreeGrid) -> Choice:
    """A policy whose rule is not known here: one copy of the trees to the host, one of the mask back."""
    size = trees.size.cpu().numpy()
    parts = [t.cpu().numpy() for t in (trees.parent, trees.depth, trees.logprob)]
    selected = policy.select(plan, flat_trees(size, None, *parts))
    n, k = trees.parent.shape
    keep = np.zeros((n, k), np.bool_)
    keep[np.arange(k) < size[:, None]] = selected.keep
    device = trees.size.device
    on_device = (keep, selected.counts, selected.slo_counts, selected.expected_tokens)
    return Choice(Kept(*(to_device(v, device) for v in on_device)), selected.counts, on_host=selected)


def flat_trees(
    size: np.ndarray, token: np.ndarray | None, parent: np.ndarray, depth: np.ndarray, logprob: np.ndarray
) -> CandidateTrees:
    """A host grid as the policy's flat trees; every argument but ``size`` [n] is [n, k]."""
    there = np.arange(parent.shape[1]) < size[:, None]
    count = int(size.sum())
    return CandidateTrees(
        row_start=np.concatenate([[0], np.cumsum(size)]),
        token=np.zeros(count, np.int64) if token is None else token[there],
        parent=parent[there],
        depth=depth[there],
        logprob=logprob[there],
    )

"""Verification on the device against the numpy worker's, on the same model and the same cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.device import verify as device
from adaserve.engine.device.drafter import DeviceDrafter
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.iteration import Iteration, StepTimes
from adaserve.engine.sources.beam import Drafter
from adaserve.engine.trees import verify as host
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.device.factories import Requests, TinyModel, device_forward, iteration_plan, read_plainly
from tests.engine.trees.factories import random_selection

TIERS = Tiers((1, 2, 4, 8, 16, 32, 64))
STRIDE = 6


class Case:
    """The same drafts, the same selection, both verifications; draws that follow the trees half the time."""

    def __init__(self, lengths: list[int], seed: int, max_depth: list[int] | None = None, none: bool = False):
        rng = np.random.default_rng(seed)
        requests = Requests(lengths, seed)
        n = len(lengths)
        running = requests.running(max_depth)
        plan = iteration_plan(running, 4, 3)
        self.models = models = [TinyModel(requests.slots), TinyModel(requests.slots)]
        for model in models:
            requests.prefill(model)
        self.host_rows = requests.host_rows(running, [0] * n)
        self.device_rows = requests.device_rows(running, [0] * n)
        self.plan = plan
        self.forward = device_forward(models[1])
        self.host_draft = Drafter(models[0], read_plainly, 48).draft(plan, self.host_rows, None)
        self.draft = DeviceDrafter(self.forward, read_plainly, 48, TIERS, 64).draft(plan, self.device_rows)
        assert self.host_draft is not None and self.draft is not None
        self.selection = random_selection(self.host_draft, rng)
        if none:
            self.selection.keep[:] = False
            self.selection.counts[:] = 0
        keep = torch.zeros(n, self.draft.shape.nodes, dtype=torch.bool)
        keep[torch.from_numpy(self.draft.active)] = torch.from_numpy(self.selection.keep).view(
            -1, self.draft.shape.nodes
        )
        self.host = host.build(self.host_rows, self.host_draft, self.selection)
        self.device = device.build(self.device_rows, self.draft, keep, self.selection.counts)
        self.draws = self._draws(rng)

    def _draws(self, rng: np.random.Generator) -> np.ndarray:
        draws = rng.integers(0, 131, len(self.host.tokens))
        for i in range(len(draws)):
            children = np.flatnonzero((self.host.parent == i) & (self.host.depth > 0))
            if len(children) and rng.random() < 0.7:
                draws[i] = self.host.tokens[rng.choice(children)]
        return draws


CASES = [
    ([5, 17, 1], 0, None),
    ([5, 9, 30, 4, 11], 1, [9, 0, 2, 0, 9]),
    ([40], 2, None),
    ([3, 3, 3, 3], 3, None),
]


@pytest.mark.parametrize(("lengths", "seed", "max_depth"), CASES)
def test_batch(lengths: list[int], seed: int, max_depth: list[int] | None) -> None:
    case = Case(lengths, seed, max_depth)
    a, b = case.host, case.device
    for name in ("tokens", "positions", "row", "depth", "parent", "root"):
        assert getattr(b, name).tolist() == getattr(a, name).tolist(), name
    assert b.slots.tolist() == a.slots.tolist()
    grid = np.flatnonzero(case.selection.keep)
    k = case.draft.shape.nodes
    assert b.node.tolist() == [case.draft.active[i // k] * k + i % k for i in grid]


@pytest.mark.parametrize(("lengths", "seed", "max_depth"), CASES)
def test_logits_and_cache(lengths: list[int], seed: int, max_depth: list[int] | None) -> None:
    """Flat slots and packed mask through SDPA, padded, give the numpy worker's logits and leave its cache."""
    case = Case(lengths, seed, max_depth)
    a = case.host
    right = case.models[0].logits(
        case.models[0].hidden(torch.from_numpy(a.tokens), torch.from_numpy(a.positions), a.slots, a.plan)
    )
    logits, best = device.forward(case.forward, case.device_rows, case.device, TIERS, most_rows=8)
    torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)
    assert torch.equal(best, right.argmax(-1))
    for one, two in zip(
        case.models[0].k + case.models[0].v, case.models[1].k + case.models[1].v, strict=True
    ):
        torch.testing.assert_close(one[1:], two[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lengths", "seed", "max_depth"), CASES)
def test_acceptance(lengths: list[int], seed: int, max_depth: list[int] | None) -> None:
    for offset in range(0, 40, 4):
        case = Case(lengths, seed + offset, max_depth)
        right = host.accept(case.host, case.draws)
        iteration = Iteration(
            case.host_rows, case.plan, case.host_draft, case.selection, case.host, case.draws, right,
            StepTimes(0, 0, 0),
        )  # fmt: skip
        got = device.accept(case.device, torch.from_numpy(case.draws), STRIDE)
        assert got.accepted.tolist() == right.accepted.tolist()
        assert got.count.tolist() == right.count.tolist()
        assert got.bonus.tolist() == iteration.bonus.tolist()
        assert got.emitted.tolist() == iteration.emitted(STRIDE).tolist()
        index = device.path_index(case.device, got, STRIDE)
        assert index.tolist() == iteration.path_index(STRIDE).tolist()
        target, source = device.moves(case.device_rows, case.device, got, 4)
        moved = {(t, s) for t, s in zip(target.tolist(), source.tolist(), strict=True) if t != s}
        pairs = iteration.moves()
        assert moved == (set() if pairs is None else set(zip(*(p.tolist() for p in pairs), strict=True)))


def test_roots_only() -> None:
    case = Case([5, 9], 0, none=True)
    assert case.device.tokens.tolist() == case.host_rows.roots.tolist()
    assert case.device.kv_lens.tolist() == [6, 10]
    logits, _ = device.forward(case.forward, case.device_rows, case.device, TIERS, most_rows=2)
    a = case.host
    right = case.models[0].hidden(torch.from_numpy(a.tokens), torch.from_numpy(a.positions), a.slots, a.plan)
    torch.testing.assert_close(logits, case.models[0].logits(right), rtol=1e-4, atol=1e-4)


def test_no_draft() -> None:
    case = Case([5, 9], 0)
    built = device.build(case.device_rows, None, None, np.zeros(2, np.int64))
    assert built.tokens.tolist() == case.host_rows.roots.tolist() and built.deepest == 0
    assert CandidateTrees.empty(2).n_nodes == 0


def test_a_tier_is_one_graph() -> None:
    case = Case([5, 9, 3], 1)
    before = len(case.forward.table)
    for _ in range(3):
        device.forward(case.forward, case.device_rows, case.device, TIERS, most_rows=8)
    assert len(case.forward.table) == before + 1

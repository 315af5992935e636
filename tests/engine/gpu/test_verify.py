"""A verification on a device against a host's, on the same model and the same cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from adaserve.engine.costs.measure import QUICK, Room, measure
from adaserve.engine.gpu.sizes import SearchKey
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import (
    SIZES,
    VOCABULARY,
    Requests,
    TinyModel,
    graph_device,
    host_device,
    iteration_plan,
)
from tests.engine.trees.factories import random_selection


class Case:
    """The same tree batch for both devices; draws that follow the trees most of the time."""

    def __init__(
        self, lengths: list[int], seed: int, max_depth: list[int] | None = None, share: float = 0.6
    ) -> None:
        rng = np.random.default_rng(seed)
        self.requests = requests = Requests(lengths, seed)
        running = requests.running(max_depth)
        self.models = [TinyModel(requests.slots), TinyModel(requests.slots)]
        for model in self.models:
            requests.prefill(model)
        self.host = host_device(requests, self.models[0], self.models[0])
        self.device = graph_device(requests, self.models[1], self.models[1])
        self.rows = requests.rows(running)
        for device in (self.host, self.device):  # both write the window
            source = requests.source(device, [0] * len(lengths))
            pending = source.propose(iteration_plan(running, 4, 3), self.rows, None)
            assert pending is not None
            proposal = pending.read()
        self.verified = verify.build(self.rows, proposal, random_selection(proposal.trees, rng, share))
        self.draws = self._draws(rng)

    def _draws(self, rng: np.random.Generator) -> torch.Tensor:
        v, draws = self.verified, rng.integers(0, VOCABULARY, len(self.verified))
        for i in range(len(draws)):
            children = np.flatnonzero((v.parent == i) & (v.depth > 0))
            if len(children) and rng.random() < 0.7:
                draws[i] = v.tokens[rng.choice(children)]
        return torch.from_numpy(draws)


CASES = [
    ([5, 17, 1], 0, None),
    ([5, 9, 30, 4, 11], 1, [9, 0, 2, 0, 9]),
    ([40], 2, None),
    ([3, 3, 3, 3], 3, None),
]


@pytest.mark.parametrize("share", [0.6, 0.0])
@pytest.mark.parametrize(("lengths", "seed", "max_depth"), CASES)
def test_logits_and_cache(lengths: list[int], seed: int, max_depth: list[int] | None, share: float) -> None:
    """Flat slots and packed mask through SDPA, padded, give the host's logits and leave its cache."""
    case = Case(lengths, seed, max_depth, share)
    batch, host, device = case.verified.batch, case.host.target, case.device.target
    right = host.logits(host.run(batch))
    states = device.run(batch)
    torch.testing.assert_close(device.logits(states), right, rtol=1e-4, atol=1e-4)
    assert torch.equal(device.argmax(states), right.argmax(-1))
    for one, two in zip(
        case.models[0].k + case.models[0].v, case.models[1].k + case.models[1].v, strict=True
    ):
        torch.testing.assert_close(one[1:], two[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lengths", "seed", "max_depth"), CASES)
def test_one_walk(lengths: list[int], seed: int, max_depth: list[int] | None) -> None:
    """What a packed upload brings to the device is what the host walks over."""
    case = Case(lengths, seed, max_depth)
    v, n = case.verified, len(lengths)
    for device in (case.host, case.device):
        tensors = device.put(v.arrays())
        for name, values in v.arrays().items():
            assert tensors[name].tolist() == values.tolist(), name
        got = device.accept(tensors, case.draws, n, v.deepest, 6)
        if device.in_place(v, got):  # then nothing would move
            target, sources = verify.moves(tensors, got, case.requests.req_to_token, n, v.deepest)
            assert all(source.tolist() == target.tolist() for source in sources)
        copy = device.get(count=got.count, emitted=got.emitted, accepted=got.accepted).read()
        assert copy["accepted"].sum() == copy["count"].sum() + n
        assert copy["accepted"].dtype == np.bool_ and copy["emitted"].shape == (n, 6)


def test_a_size_is_one_graph() -> None:
    case = Case([5, 9, 3], 1)
    table = case.device.target.table
    for _ in range(3):
        case.device.target.run(case.verified.batch)
    assert len(table) == 1


@pytest.mark.parametrize("q", [1, 3, 5])
def test_what_is_measured_is_the_graph_that_serves(q: int) -> None:
    """A draft's price is that of a whole search, by the number of its steps."""
    requests, model = Requests([12, 20, 7]), TinyModel(4096)
    device = graph_device(requests, model, model)
    draft, lengths = device.drafts[0], np.array(requests.lengths)
    batch = TreeBatch.causal(np.arange(3 * q) + 3, requests.pool_rows, lengths - q, np.full(3, q))
    assert draft.rehearse(batch, 3) == SIZES.depth == len(model.written)
    assert len(draft.take_runs()) == 1 and list(draft.table) == [SearchKey(4, (min(q, 3),) * SIZES.depth)]


@pytest.mark.parametrize("make", [host_device, graph_device])
def test_the_measurement_runs_through_what_is_served(make: object) -> None:
    requests = Requests([5, 5, 5, 5, 5, 5])
    requests.req_to_token.zero_()
    grid = dataclasses.replace(
        QUICK, verify_tokens=(1, 8, 60), draft_tokens=(1, 12), contexts=(32,), repeats=1
    )
    model = TinyModel(2048)
    device = make(requests, model, model)  # type: ignore[operator]
    room = Room(device, requests.req_to_token, slots=2048, most_rows=100, context_len=96)
    profile = measure(room, device.drafts, grid)
    long = {(n * q, n * c, n) for n in (1, 4) for q in (1, 4) for c in (32, 88)}
    assert {tuple(p) for p in profile.verify[:, :3]} == {(1, 32, 1), (8, 64, 2)} | long, "60 have no room"
    assert profile.draft[:2, 0].tolist() == [1, 12]
    assert (profile.verify[:, 3] > 0).all() and not requests.req_to_token.any()

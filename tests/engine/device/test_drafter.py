"""The device's beam search drafts what the numpy worker drafts, on the same model and the same cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from adaserve.engine.device.drafter import DeviceDraft, DeviceDrafter
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.sources.beam import Draft, Drafter
from tests.engine.device.factories import CONTEXT, Requests, TinyModel, device_forward, iteration_plan

TIERS = Tiers((1, 2, 4, 8))
SHAPES = [(1, 1, None), (4, 1, None), (5, 3, None), (3, 2, None), (3, 1, (2, 1, 3)), (4, 1, (1, 1, 3, 1))]


def reading(temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Requests that sample share their noise, in part."""
    return 1.0 / (0.5 + temperature), 0.9 * (temperature > 0)


def both(
    requests: Requests, depth: int, width: int, branching: tuple[int, ...] | None = None,
    max_depth: list[int] | None = None, lag: list[int] | None = None, max_nodes: int = 48,
    temperature: float = 0.3,
) -> tuple[Draft | None, DeviceDraft | None, TinyModel]:  # fmt: skip
    """The same draft by both drafters, each on its own copy of the cache; the device's model last."""
    lag = lag or [0] * len(requests.lengths)
    running = requests.running(max_depth, temperature)
    plan = iteration_plan(running, depth, width, branching)
    known = [length - behind for length, behind in zip(requests.lengths, lag, strict=True)]
    one, two = TinyModel(requests.slots), TinyModel(requests.slots)
    requests.prefill(one, known)
    requests.prefill(two, known)
    host = Drafter(one, reading, max_nodes).draft(plan, requests.host_rows(running, lag), None)
    drafter = DeviceDrafter(device_forward(two), reading, max_nodes, TIERS, most_tokens=16)
    return host, drafter.draft(plan, requests.device_rows(running, lag)), two


def assert_same(host: Draft | None, device: DeviceDraft | None) -> None:
    assert host is not None and device is not None
    a, k = len(device.active), device.shape.nodes
    assert device.active.tolist() == host.rows.tolist() and device.shape == host.shape
    assert torch.equal(device.tokens, torch.from_numpy(host.trees.token).view(a, k))
    assert torch.equal(device.parents, torch.from_numpy(host.trees.parent).view(a, k))
    assert torch.equal(device.visible, torch.from_numpy(host.visible))
    torch.testing.assert_close(
        device.logprobs, torch.from_numpy(host.trees.logprob).view(a, k), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (0, 0.3), (1, 0.9)])
def test_same_trees(
    depth: int, width: int, branching: tuple[int, ...] | None, seed: int, temperature: float
) -> None:
    host, device, _ = both(Requests([5, 17, 1], seed), depth, width, branching, temperature=temperature)
    assert_same(host, device)


def test_noise_makes_other_trees() -> None:
    trees = [both(Requests([5, 17, 1]), 3, 2, temperature=t)[1] for t in (0.0, 0.3)]
    assert trees[0] is not None and trees[1] is not None
    assert not torch.equal(trees[0].tokens, trees[1].tokens)


def test_greedy_beside_sampled() -> None:
    """In one noisy forward a greedy request is drafted for as it is alone."""
    requests = Requests([5, 17, 9])
    model = TinyModel(requests.slots)
    requests.prefill(model)
    forward = device_forward(model)
    drafts = []
    for hot in (0.0, 0.8):
        running = dataclasses.replace(requests.running(), temperature=np.array([0.0, hot, 0.0]))
        rows = requests.device_rows(running, [0, 0, 0])
        drafts.append(
            DeviceDrafter(forward, reading, 48, TIERS, 64).draft(iteration_plan(running, 3, 2), rows)
        )
    one, two = drafts
    assert one is not None and two is not None
    assert torch.equal(one.tokens[[0, 2]], two.tokens[[0, 2]])
    assert not torch.equal(one.tokens[1], two.tokens[1])


def test_rows_without_a_tree() -> None:
    host, device, _ = both(Requests([5, 9, 30, 4, 11]), 4, 3, max_depth=[4, 0, 2, 0, 9])
    assert_same(host, device)
    assert device is not None
    grid = device.grid(5)
    assert grid.size.tolist() == [12, 0, 12, 0, 12]
    assert torch.equal(grid.parent[[0, 2, 4]], device.parents)


def test_nothing_to_draft() -> None:
    assert both(Requests([5, 9]), 3, 2, max_depth=[0, 0])[1] is None


@pytest.mark.parametrize(("max_nodes", "depth"), [(12, 4), (11, 3), (3, 1), (2, 0)])
def test_a_tree_is_cut_to_its_window(max_nodes: int, depth: int) -> None:
    device = both(Requests([5]), 4, 3, max_nodes=max_nodes)[1]
    assert (device.depth if device is not None else 0) == depth


@pytest.mark.parametrize("lag", [[1, 0, 1], [3, 0, 1], [19, 40, 2]])
def test_catching_up(lag: list[int]) -> None:
    """Tokens that the draft has not seen are fed first, in several forwards if they are many."""
    host, device, _ = both(Requests([20, 40, 33]), 4, 3, lag=lag)
    assert_same(host, device)


def test_the_end_of_the_context() -> None:
    """Positions beyond the rotary table and slots beyond the cached tokens do no harm."""
    requests = Requests([CONTEXT - 14, 6])
    _, device, _ = both(requests, 4, 3)
    assert device is not None and torch.isfinite(device.logprobs).all()


def test_padding_touches_the_scratch_slot_only() -> None:
    requests = Requests([5, 9, 30])  # padded to 4 rows
    _, device, model = both(requests, 3, 2)
    assert device is not None
    written = torch.cat(model.written)
    rows = requests.pool_rows[:, None]
    positions = torch.tensor(requests.lengths)[:, None] - 1 + torch.arange(8)
    own = set(requests.req_to_token[rows, positions].flatten().tolist())
    assert set(written.tolist()) <= own | {0} and 0 in written.tolist()
    assert len(model.written) == 3, "one forward a step"


def test_graphs_are_bounded_and_reused() -> None:
    requests = Requests([5, 9, 30])
    model = TinyModel(requests.slots)
    requests.prefill(model)
    forward = device_forward(model)
    drafter = DeviceDrafter(forward, reading, 48, TIERS, most_tokens=64)
    running = requests.running()
    for depth, width in [(1, 1), (2, 2), (4, 3), (3, 3), (4, 2), (4, 3)]:
        drafter.draft(iteration_plan(running, depth, width), requests.device_rows(running, [0, 0, 0]))
    assert len(forward.table) == 1 + 2  # the first step, and steps of 2 and 3 beams; the chain has one step
    drafter.draft(iteration_plan(running, 3, 3), requests.device_rows(running, [7, 0, 0]))
    assert len(forward.table) == 3, "catching up makes no graph"

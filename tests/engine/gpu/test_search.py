"""A device's beam search drafts what a host's does, on the same model and the same cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from adaserve.engine.gpu.sizes import Key
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.shape import ANY_DEPTH
from adaserve.scheduler.interface import DraftPlan
from tests.engine.gpu.factories import (
    CONTEXT,
    NOISY,
    Requests,
    TinyModel,
    graph_device,
    host_device,
    iteration_plan,
)

SHAPES = [(1, 1, None), (4, 1, None), (5, 3, None), (3, 2, None), (3, 1, (2, 1, 3)), (4, 1, (1, 1, 3, 1))]


def both(
    requests: Requests, depth: int, width: int, branching: tuple[int, ...] | None = None,
    max_depth: list[int] | None = None, lag: list[int] | None = None, max_nodes: int = 48,
    temperature: float = 0.3, recent: list[int] | None = None,
) -> tuple[Proposal | None, Proposal | None, TinyModel]:  # fmt: skip
    """The same draft by host and device, each on its own copy of the cache; the device's model last."""
    lag = lag or [0] * len(requests.lengths)
    running = requests.running(max_depth, temperature)
    plan = iteration_plan(running, depth, width, branching)
    if recent is not None:
        draft = dataclasses.replace(plan.draft, window=np.array(recent), sinks=2)
        plan = dataclasses.replace(plan, draft=draft)
    known = [length - behind for length, behind in zip(requests.lengths, lag, strict=True)]
    models = [TinyModel(requests.slots), TinyModel(requests.slots)]
    found: list[Proposal | None] = []
    for make, model in zip((host_device, graph_device), models, strict=True):
        requests.prefill(model, known)
        source = requests.source(make(requests, model, model), lag, NOISY, max_nodes)
        pending = source.propose(plan, requests.rows(running), None)
        found.append(None if pending is None else pending.read())
    return found[0], found[1], models[1]


def assert_same(host: Proposal | None, device: Proposal | None) -> None:
    assert host is not None and device is not None
    assert device.width == host.width and np.array_equal(device.column, host.column)
    for name in ("row_start", "token", "parent", "depth"):
        assert np.array_equal(getattr(device.trees, name), getattr(host.trees, name)), name
    np.testing.assert_allclose(device.trees.logprob, host.trees.logprob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.0), (0, 0.3), (1, 0.9)])
def test_same_trees(
    depth: int, width: int, branching: tuple[int, ...] | None, seed: int, temperature: float
) -> None:
    host, device, _ = both(Requests([5, 17, 1], seed), depth, width, branching, temperature=temperature)
    assert_same(host, device)


def test_same_trees_of_a_draft_that_reads_little() -> None:
    """The device feeds the last cached token in any case, so the host's draft has not seen it either."""
    requests, lag = Requests([5, 30, 21]), [1, 1, 1]
    host, device, _ = both(requests, 4, 3, lag=lag, recent=[8, 5, 0])
    assert_same(host, device)
    everything, _, _ = both(requests, 4, 3, lag=lag)
    assert host is not None and everything is not None
    start = host.trees.row_start
    few, full = (p.trees.logprob for p in (host, everything))
    np.testing.assert_allclose(few[: start[1]], full[: start[1]])
    assert np.abs(few[start[1] : start[2]] - full[start[1] : start[2]]).max() > 1e-3
    np.testing.assert_allclose(few[start[2] :], full[start[2] :])


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
@pytest.mark.parametrize("recent", [None, [8, 5, 0]])
def test_same_trees_where_the_target_drafts_for_itself(
    depth: int, width: int, branching: tuple[int, ...] | None, recent: list[int] | None
) -> None:
    """Its first step has the roots and nothing else: what was committed keeps its KV."""
    requests, found = Requests([5, 30, 21]), []
    plan = iteration_plan(requests.running(), depth, width, branching)
    window = None if recent is None else np.array(recent)
    plan = dataclasses.replace(plan, draft=dataclasses.replace(plan.draft, window=window, sinks=2))
    for make in (host_device, graph_device):
        model = TinyModel(requests.slots)
        requests.prefill(model)
        before = [x.clone() for x in (*model.k, *model.v)]
        device = make(requests, model, drafts_itself=True)
        assert device.self_drafter is not None and list(device.drafters) == [device.self_drafter]
        source = StatelessSource(device.self_drafter, NOISY, 48, ANY_DEPTH)
        pending = source.propose(plan, requests.rows(plan.running), None)
        assert pending is not None
        found.append(pending.read())
        for row, length in zip(requests.pool_rows, requests.lengths, strict=True):
            slots = requests.req_to_token[row, :length].long()
            assert all(
                (a[slots] == b[slots]).all() for a, b in zip(before, (*model.k, *model.v), strict=True)
            )
    assert_same(*found)


def test_contexts_are_read_in_part_and_whole_by_turns() -> None:
    """On one device, whose graphs read their inputs where the first search had them."""
    requests, model = Requests([5, 30, 21]), TinyModel(4096)
    requests.prefill(model)
    device, running, found = graph_device(requests, model, model), requests.running(), []
    for recent in ([8, 5, 0], None, [8, 5, 0]):
        window = None if recent is None else np.array(recent)
        draft = DraftPlan(4, 3, window=window, sinks=2)
        plan = dataclasses.replace(iteration_plan(running, 4, 3), draft=draft)
        pending = requests.source(device, [0, 0, 0]).propose(plan, requests.rows(running), None)
        assert pending is not None
        found.append(pending.read().trees.logprob.tolist())
    assert found[0] == found[2] != found[1] and len(device.drafts[0].table) == 1


def test_noise_makes_other_trees() -> None:
    trees = [both(Requests([5, 17, 1]), 3, 2, temperature=t)[1] for t in (0.0, 0.3)]
    assert trees[0] is not None and trees[1] is not None
    assert not np.array_equal(trees[0].trees.token, trees[1].trees.token)


def test_no_noise_where_the_target_draws_by_another() -> None:
    """SGLang's deterministic inference has its own: drafts then go by likelihood alone."""
    requests, tokens = Requests([5, 17, 9]), []
    for noisy in (True, False):
        model = TinyModel(requests.slots)
        requests.prefill(model)
        running = requests.running(temperature=0.9)
        rows = dataclasses.replace(requests.rows(running), noisy=noisy)
        source = requests.source(graph_device(requests, model, model), [0, 0, 0], NOISY)
        other = [dataclasses.replace(s, key=s.key + 1) for s in rows.states]
        for states in (rows.states, other):
            pending = source.propose(
                iteration_plan(running, 3, 2), dataclasses.replace(rows, states=states), None
            )
            assert pending is not None
            tokens.append(pending.read().trees.token.tolist())
    assert tokens[0] != tokens[1] and tokens[2] == tokens[3]


def test_greedy_beside_sampled() -> None:
    """In one noisy forward a greedy request is drafted for as it is alone."""
    requests = Requests([5, 17, 9])
    model = TinyModel(requests.slots)
    requests.prefill(model)
    source = requests.source(graph_device(requests, model, model), [0, 0, 0], NOISY)
    drafts = []
    for hot in (0.0, 0.8):
        running = dataclasses.replace(requests.running(), temperature=np.array([0.0, hot, 0.0]))
        pending = source.propose(iteration_plan(running, 3, 2), requests.rows(running), None)
        assert pending is not None
        drafts.append(pending.read().trees.token.reshape(3, -1))
    one, two = drafts
    assert np.array_equal(one[[0, 2]], two[[0, 2]]) and not np.array_equal(one[1], two[1])


def test_candidates_lie_outside_of_graphs() -> None:
    """A graph that was captured before, such as one of a prefill, writes to what later ones make inside. So
    the candidates are always left in the same place, and no graph makes that."""
    requests, places = Requests([5, 17, 9]), []
    model = TinyModel(requests.slots)
    requests.prefill(model)
    source = requests.source(graph_device(requests, model, model), [0, 0, 0])
    running = requests.running()
    for depth in (3, 2, 3):
        pending = source.propose(iteration_plan(running, depth, 2), requests.rows(running), None)
        assert pending is not None and pending.unread is not None
        places.append(pending.unread().found)
    assert places[0].data_ptr() == places[2].data_ptr() != places[1].data_ptr()


def test_rows_without_a_tree() -> None:
    host, device, _ = both(Requests([5, 9, 30, 4, 11]), 4, 3, max_depth=[4, 0, 2, 0, 9])
    assert_same(host, device)
    assert device is not None and np.diff(device.trees.row_start).tolist() == [12, 0, 12, 0, 12]


def test_nothing_to_draft() -> None:
    assert both(Requests([5, 9]), 3, 2, max_depth=[0, 0])[1] is None


@pytest.mark.parametrize("lag", [[1, 0, 1], [3, 0, 1], [19, 40, 2]])
def test_catching_up(lag: list[int]) -> None:
    """Tokens that the draft has not seen are fed first, in several forwards if they are many."""
    host, device, model = both(Requests([20, 40, 33]), 4, 3, lag=lag)
    assert_same(host, device)
    assert max(map(len, model.written)) <= 64


def test_a_text_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that catch up, and heads that read prompts: the host works out a mask by the square of these
    tokens. What is verified is the target's, and as large as it gets."""
    monkeypatch.setattr("adaserve.engine.gpu.device.READ_AT_ONCE", 16)
    host, device, model = both(Requests([20, 40, 33]), 4, 3, lag=[19, 40, 2])
    assert_same(host, device)
    assert max(map(len, model.written)) == 16
    made = graph_device(Requests([5]), model, model)
    assert (made.target.most_tokens, made.drafts[0].most_tokens) == (64, 16)


def test_the_end_of_the_context() -> None:
    """Positions beyond the rotary table and slots beyond the cached tokens do no harm."""
    _, device, _ = both(Requests([CONTEXT - 14, 6]), 4, 3)
    assert device is not None and np.isfinite(device.trees.logprob).all()


def test_padding_touches_the_scratch_slot_only() -> None:
    requests = Requests([5, 9, 30])  # padded to 4 rows
    _, device, model = both(requests, 3, 2)
    assert device is not None
    written = torch.cat(model.written)
    positions = np.array(requests.lengths)[:, None] - 1 + np.arange(8)
    own = set(requests.req_to_token[requests.pool_rows[:, None], positions].flatten().tolist())
    assert set(written.tolist()) <= own | {0} and 0 in written.tolist()
    assert len(model.written) == 3, "one forward for each step"


def test_graphs_are_bounded_and_reused() -> None:
    requests = Requests([5, 9, 30])
    model = TinyModel(requests.slots)
    requests.prefill(model)
    device = graph_device(requests, model, model)
    running = requests.running()

    def draft(depth: int, width: int, lag: list[int]) -> None:
        source = requests.source(device, lag)
        assert source.propose(iteration_plan(running, depth, width), requests.rows(running), None)

    for depth, width in [(1, 1), (2, 2), (4, 3), (3, 3), (4, 2), (4, 3)]:
        draft(depth, width, [0, 0, 0])
    table = device.drafts[0].table
    assert len(table) == 5, "one for each depth and width"
    draft(3, 3, [4, 0, 0])
    # After iterations without a draft, and where earlier text was accepted. Launched one by one, the kernels
    # of a forward take ten times as long.
    assert len(table) == 6 and isinstance([*table][-1], Key), "catching up has graphs of its own"

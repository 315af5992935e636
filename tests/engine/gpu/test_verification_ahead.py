"""Where nothing is drafted, a verification is queued before the host knows what the last one drew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from adaserve.engine.device_timing import HostMark
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.request_state import UNKNOWN, BatchRequests
from adaserve.engine.sampling import Settings
from adaserve.engine.transfer import QueuedCopy
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import DraftPlan, IterationPlan, RunningBatch
from adaserve.scheduler.policies import build_policy
from tests.engine.gpu.factories import TinyModel
from tests.engine.gpu.test_decode import (
    DEPTH,
    TOKENS,
    Run,
    check_cache_of,
    check_draft_cache,
    policy_config,
)


def went_ahead(run: Run) -> list[bool]:
    return [outcome.plan.running.underway == DraftPlan(0) for outcome in run.outcomes]


def test_it_is_queued_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run, order, queue, read = Run("none", overlap=True), [], GpuForward.run, QueuedCopy.read

    def queued(self: GpuForward, *args: Any) -> Any:
        order.append("queue")
        return queue(self, *args)

    def reads(self: QueuedCopy) -> Any:
        if self._values is None:
            order.append("read")
        return read(self)

    monkeypatch.setattr(GpuForward, "run", queued)
    monkeypatch.setattr(QueuedCopy, "read", reads)
    for _ in range(3):
        run.step()
    assert order == ["queue", "queue", "read", "queue", "read"]
    run.finish().check()
    assert went_ahead(run) == [False, *[True] * (run.iterations - 1)]
    assert all(token != UNKNOWN for state in run.loop.requests.states.values() for token in state.generated)


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_request_that_ended_is_left_out(leaves: int) -> None:
    run = Run("none", overlap=True)
    run.step()
    req, got = run.reqs.pop(leaves), run.got
    whole = run.batch()
    rows = whole.req_pool_indices[[r for r in range(len(got)) if r != leaves]]
    lens = run.lens[[r for r in range(len(got)) if r != leaves]]
    bonus = [tokens[-1] for r, tokens in enumerate(got) if r != leaves]
    whole.req_pool_indices, whole.req_pool_indices_cpu, whole.seq_lens = rows, rows, lens
    whole.spec_info.bonus_tokens = whole.spec_info.bonus_tokens.new_tensor(bonus)
    result = run.loop.decode(whole, None)
    run.loop.settle()
    assert went_ahead(run) == [False, True]
    assert result.next_draft_input.bonus_tokens.tolist() == [
        tokens[2] for r, tokens in enumerate(run.expected) if r != leaves
    ]
    for r, other in enumerate([*run.reqs[:leaves], req, *run.reqs[leaves:]]):
        state = run.loop.requests.states[other.req_pool_idx]
        assert state.generated == run.expected[r][: 2 if r == leaves else 3]
        assert state.decoded == len(state.generated) - 1


def penalized(batch: Any, run: Run) -> None:
    batch.reqs[0].sampling_params.frequency_penalty = 0.1


def constrained(batch: Any, run: Run) -> None:
    batch.reqs[0].grammar = object()


def processed(batch: Any, run: Run) -> None:
    batch.sampling_info.has_custom_logit_processor = True


def prefilled(batch: Any, run: Run) -> None:
    run.loop.settle()


def changed(batch: Any, run: Run) -> None:
    run.policies.current = build_policy("none", policy_config())


def to_be_drafted(batch: Any, run: Run) -> None:
    last = run.loop._arriving
    assert last is not None
    run.loop._arriving = replace(last, plan=replace(last.plan, then=DraftPlan(1)))


def planned_on_the_host(batch: Any, run: Run) -> None:
    """FlashInfer's plans lie in memory that the forward before may not have read."""
    run.loop.device.target.follows = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "what",
    [penalized, constrained, processed, prefilled, changed, to_be_drafted, planned_on_the_host],
)
def test_not_where_more_has_to_be_known(what: Callable[[Any, Run], None]) -> None:
    run = Run("none", overlap=True)
    run.step()
    run.step()
    batch = run.batch()
    assert ahead(run, batch)
    what(batch, run)
    assert not ahead(run, batch)


def ahead(run: Run, batch: Any) -> bool:
    states = run.loop.requests.at(batch.req_pool_indices.tolist())
    asked, settings, last = BatchRequests.of(batch.reqs, states), Settings.of(batch.reqs), run.loop._arriving
    return last is not None and run.loop._goes_ahead(last, batch, asked, settings)


def test_grammars_are_awaited_once_the_last_one_is_read() -> None:
    """SGLang advances them by what it accepted."""
    run, heard = Run("chain-3", overlap=True), list[bool]()
    run.step()
    run.loop.decode(run.batch(), None, lambda: heard.append(run.loop._arriving is None))
    assert heard == [True]


def test_not_where_texts_are_searched() -> None:
    run = Run("chain-3", overlap=True, drafts="suffix")
    run.policies.current.plan = shallow(run.policies.current.plan)  # type: ignore[method-assign]
    for _ in range(4):
        run.step()
    run.loop.settle()
    assert not any(went_ahead(run))
    plain = Run("none", overlap=True, drafts="suffix")
    plain.step()
    assert ahead(plain, plain.batch()), "it takes no offers"


def shallow(plan: Callable[..., IterationPlan]) -> Callable[..., IterationPlan]:
    """As if drafting did not pay."""

    def planned(running: RunningBatch, now_s: float) -> IterationPlan:
        return replace(plan(running, now_s), draft=DraftPlan(0), then=DraftPlan(0), budget=len(running))

    return planned


def test_then_it_drafts_again() -> None:
    """The draft has missed tokens, among them those that nobody knew when they were verified."""
    run = Run("chain-3", overlap=True)
    deep = run.policies.current.plan
    run.policies.current.plan = shallow(deep)  # type: ignore[method-assign]
    for _ in range(5):
        run.step()
    run.policies.current.plan = deep  # type: ignore[method-assign]
    run.finish().check()
    assert went_ahead(run)[:7] == [False, True, True, True, True, True, False]
    assert any(outcome.plan.draft.depth == 3 for outcome in run.outcomes) and DEPTH >= 3
    check_draft_cache(run)


def test_a_draft_is_queued_behind_it() -> None:
    """Where the last draft was in vain, so that all that the next one has not read is a token that nobody
    knows."""
    run = Run("chain-3", overlap=True, copied=True)
    run.step()
    run.step()
    plan, turn = run.policies.current.plan, iter(range(TOKENS))

    def planned(running: RunningBatch, now_s: float) -> IterationPlan:
        made, in_vain = plan(running, now_s), next(turn) % 3 == 0
        return replace(made, then=DraftPlan(0), budget=len(running), takes_all=False) if in_vain else made

    run.policies.current.plan = planned  # type: ignore[method-assign]
    run.finish().check()
    underway = [None if (u := o.plan.running.underway) is None else u.depth for o in run.outcomes]
    assert underway[2:8] == [3, 0, 3] * 2
    check_cache_of(run, run.source, run.draft, TinyModel(run.requests.slots))
    for outcome in run.outcomes[4:8:3]:
        assert (outcome.new_tokens == 4).all(), "a copy of the target was wrong"


@pytest.mark.parametrize("policy", ["priced", "turbospec"])
def test_what_does_not_pay_is_still_tried(policy: str) -> None:
    """Of a draft that a plan wants, the next iteration is the first that can make it. Nothing pays here."""
    run = Run(policy, overlap=True)
    dear = LatencyModel(ForwardCost(1.0), ForwardCost(0.001, per_token_s=0.01))
    config = replace(policy_config(), latency=dear, learn_costs=False, probe_every=4, turbo_probe_every=4)
    run.policies.current = build_policy(policy, config)
    run.finish().check()
    drafted = [outcome.plan.draft.depth for outcome in run.outcomes]
    assert 2 <= len(drafted) - drafted.count(0) <= len(drafted) // 2 and max(drafted) == 1
    assert went_ahead(run).count(True) >= len(drafted) // 3


def test_its_clock_is_the_devices() -> None:
    """The host queues it while the last one runs, and it begins when that one ends."""
    run = Run("none", overlap=True)
    for _ in range(4):
        run.step()
    last = run.loop._arriving
    assert last is not None
    time.sleep(0.1)  # as long as its forward may take; no prompt is read
    run.step()
    this = run.loop._arriving
    assert this is not None and this.behind is last.marks.accepted
    run.loop.settle()
    before, after = last.marks.accepted, this.marks.accepted
    assert isinstance(before, HostMark) and isinstance(after, HostMark)
    ended = [outcome.end_s for outcome in run.outcomes[-2:]]
    assert ended[1] - ended[0] == pytest.approx(after.time_s - before.time_s)
    assert len(run.outcomes) < TOKENS

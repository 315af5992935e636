"""A draft that was queued before the outcome of a verification is the one that would have been made after
it."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.device import Beams
from adaserve.engine.device_timing import HostMark
from adaserve.engine.kv_compaction import KVCompactor
from adaserve.engine.queued_ahead import DraftAhead
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.source import ProposalAhead
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import DraftPlan, IterationPlan
from adaserve.scheduler.policies import build_policy
from tests.engine.gpu.factories import (
    NOISY,
    Requests,
    TinyModel,
    graph_device,
    host_device,
    iteration_plan,
)
from tests.engine.gpu.scripts import python
from tests.engine.gpu.test_decode import Run, policy_config
from tests.engine.gpu.test_search import assert_same

MOST = 5
"""Tokens that the verification may commit of a request."""


class Case:
    """Requests whose verification is on its way, and the same after it: ``counts`` tokens come of each."""

    def __init__(self, lengths: list[int], counts: list[int], temperature: float = 0.3) -> None:
        self.before, self.after = Requests([*lengths]), Requests([*lengths])
        n = len(lengths)
        emitted = torch.randint(0, 64, (n, MOST), generator=torch.Generator().manual_seed(3))
        for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tokens = emitted[r].tolist()
            self.after._texts[r][length : length + count] = [self.before.roots[r], *tokens[: count - 1]]
            self.after.roots[r] = tokens[count - 1]
            self.after.lengths[r] = length + count
        self.tensors = {"tree": torch.tensor([[9, *self.before.roots]]), "root": 1 + torch.arange(n)}
        self.acceptance: Any = SimpleNamespace(length=torch.tensor(counts), emitted=emitted)
        self.temperature = temperature
        self.model = TinyModel(self.before.slots)
        self.after.prefill(self.model, [length - 1 for length in self.after.lengths])
        self.source = self._source(self.before, [0] * n)
        self.source.cache._exchangeable.clear()

    def _source(self, requests: Requests, lag: list[int]) -> BeamSource:
        return requests.source(graph_device(requests, self.model, self.model), lag, NOISY)

    def ahead(
        self, plan: IterationPlan, drafted: np.ndarray | None = None, nodes: int = 0
    ) -> ProposalAhead | None:
        verified: Any = SimpleNamespace(
            made_by={} if drafted is None else {0: drafted}, node=np.zeros(nodes, np.int64), deepest=MOST - 1
        )
        rows = self.before.rows(self.before.running(temperature=self.temperature))
        return self.source.propose_ahead(plan, rows, verified, self.tensors, self.acceptance)

    def expected(self, draft: DraftPlan) -> Proposal:
        """On a host, which has read everything but the last token."""
        running = self.after.running(temperature=self.temperature)
        model = TinyModel(self.after.slots)
        self.after.prefill(model, [length - 1 for length in self.after.lengths])
        host = self.after.source(host_device(self.after, model, model), [1] * len(running), NOISY)
        pending = host.propose(IterationPlan(0, 0.0, running, draft, 1000), self.after.rows(running), None)
        assert pending is not None
        return pending.read()

    def plan(self, draft: DraftPlan) -> IterationPlan:
        running = self.before.running(temperature=self.temperature)
        return dataclasses.replace(iteration_plan(running, 1, 1), then=draft)


def test_beams_of_some_rows() -> None:
    """Nothing is copied where all stay as they are."""
    tokens = np.arange(6).reshape(3, 2)
    beams = Beams(tokens, tokens + 10, tokens * 0.5, 1)
    assert beams.of(np.arange(3)) is beams
    for rows in ([0, 1], [1, 0, 2], [2], []):
        some = beams.of(np.array(rows, np.int64))
        assert np.array_equal(some.tokens, tokens[rows]) and np.array_equal(some.parents, tokens[rows] + 10)
        assert np.array_equal(some.logprobs, tokens[rows] * 0.5) and some.steps == 1


SHAPES = [DraftPlan(1), DraftPlan(4), DraftPlan(5, 3), DraftPlan(3, 2), DraftPlan(3, 1, (2, 1, 3))]


@pytest.mark.parametrize("draft", SHAPES)
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 3], [5, 5, 5]])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_trees(draft: DraftPlan, counts: list[int], temperature: float) -> None:
    case, all_rows = Case([5, 17, 2], counts, temperature), np.arange(3)
    ahead = case.ahead(case.plan(draft))
    assert ahead is not None and ahead.draft == draft
    found = ahead.take(all_rows, all_rows, 3).read()
    assert_same(case.expected(draft), found)


def test_a_draft_that_reads_little() -> None:
    """The recent tokens are those of before, so that it reads what has come since in addition."""
    counts = [4, 1, 2]
    case, every = Case([30, 5, 21], counts), np.arange(3)
    window = np.array([8, 16, 5])
    ahead = case.ahead(case.plan(DraftPlan(4, 3, window=window, sinks=2)))
    assert ahead is not None and ahead.draft.window is not None
    expected = case.expected(DraftPlan(4, 3, window=window + counts, sinks=2))
    assert_same(expected, ahead.take(every, every, 3).read())


def test_some_go_on_and_others_have_come() -> None:
    """Their candidates are those that they have among all; who has come has none."""
    case = Case([5, 17, 9], [2, 4, 1])
    draft = DraftPlan(3, 2, rows=np.array([True, True, False]))
    ahead = case.ahead(case.plan(draft))
    assert ahead is not None and len(ahead.states) == 2
    new = dataclasses.replace(ahead.states[0], rid="new")
    rows, mine = ahead.among([new, ahead.states[1], new])
    assert (rows.tolist(), mine.tolist()) == ([1], [1])
    underway = ahead.for_rows(rows, mine, 3)
    assert underway.rows is not None and underway.rows.tolist() == [False, True, False]
    found, whole = ahead.take(rows, mine, 3).read(), case.expected(draft)
    start = whole.trees.row_start
    assert found.trees.row_start.tolist() == [0, 0, start[2] - start[1], start[2] - start[1]]
    assert found.trees.token.tolist() == whole.trees.token[start[1] : start[2]].tolist()
    assert [case.source.cache[row].length for row in case.before.pool_rows.tolist()] == [5, 17, 9]


def test_it_is_dropped_where_more_have_come_than_go_on() -> None:
    case = Case([5, 17, 9], [2, 4, 1])
    made = case.ahead(case.plan(DraftPlan(3, 2)))
    assert made is not None
    ahead, known = DraftAhead(made, made.states, HostMark(), []), list(made.states)
    new = [dataclasses.replace(known[0], rid=rid) for rid in ("new", "newer")]
    for states, drafted in ((known, 3), (known[:1], 1), ([*known[:2], *new], 2)):
        taken = ahead.take(states)
        assert taken is not None and taken.plan.count(len(states)) == drafted
    for states in ([*known[:1], *new], new, []):
        assert ahead.take(states) is None


@pytest.mark.parametrize(
    ("what", "made"), [("all", [False, True, True]), ("other", [False, True, False]), ("none", None)]
)
def test_only_behind_its_own_nodes(what: str, made: list[bool] | None) -> None:
    """Behind those of others it would not know what it has not read."""
    case = Case([5, 17, 9], [1, 1, 1])
    ahead = case.ahead(case.plan(DraftPlan(2)), None if made is None else np.array(made), nodes=2)
    assert (ahead is not None) == (what == "all")


def test_not_where_something_has_to_be_read_first() -> None:
    case = Case([5, 17, 9], [1, 1, 1])
    case.source.cache.advanced(int(case.before.pool_rows[1]), [3], known=0)
    assert case.ahead(case.plan(DraftPlan(2))) is None
    some = DraftPlan(2, rows=np.array([True, False, True]))
    assert case.ahead(case.plan(some)) is not None
    assert case.ahead(case.plan(DraftPlan(0))) is None


KERNELS = """
import torch
from adaserve.bench.gpu_check.follow_kernels import check_follow

for sizes in ((1, 3), (5, 2), (9, 4)):
    found = check_follow(*sizes, torch.device("cpu"))
    assert found["right"], found
"""


COMPILED = """
import torch
from adaserve.engine.gpu.attention_kernel import TILE
from adaserve.engine.gpu.follow_kernel import _begin, _shorten
from adaserve.engine.gpu.attention_layout import LIST
from tests.engine.gpu.compiling import compiles_once

numbers, tiles, begins, shortens = torch.zeros(9).long(), torch.zeros(9, dtype=torch.int32), [], []
for start, q in ((0, 1), (1, 2), (2, 16)):
    there = numbers[start:]
    begins.append((*[there] * 10, q, 16 * q, q, q, LIST))
    shortens.append((tiles[start:], there, q, TILE))
assert compiles_once(_begin, *begins) and compiles_once(_shorten, *shortens)
"""


def test_the_kernels_do_the_same() -> None:
    python(KERNELS, interpret=True)


def test_the_kernels_compile_once_whatever_is_drafted() -> None:
    """And for compute capability 9.0."""
    python(COMPILED, interpret=False)


@pytest.mark.parametrize("policy", ["adaserve", "chain-3", "fixed-tree"])
def test_all_but_the_first_iterations_are_drafted_early(policy: str) -> None:
    """At first SGLang may still exchange the slots of prompts."""
    run = Run(policy, overlap=True).finish()
    run.check()
    ahead = [outcome.plan.running.underway is not None for outcome in run.outcomes]
    goes_on = [outcome.plan.running.remaining_tokens.max() > 1 for outcome in run.outcomes]
    assert ahead == [False, False, *goes_on[2:]] and sum(ahead) > 4
    ends = [outcome.end_s for outcome in run.outcomes]
    assert ends == sorted(ends)


def test_not_where_outcomes_are_awaited() -> None:
    run = Run("adaserve", overlap=False).finish()
    assert not any(outcome.plan.running.underway for outcome in run.outcomes)


def test_the_clock_of_early_drafts_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV moves between an outcome and the draft behind it. If that time were lost, iterations would end
    the earlier the longer drafts are queued ahead, and prompts would seem to take what is missing."""
    run, compact = Run("chain-3", overlap=True), KVCompactor.compact

    def slow(*args: Any) -> None:
        compact(*args)
        time.sleep(0.05)

    monkeypatch.setattr(KVCompactor, "compact", slow)
    for _ in range(6):
        run.step()
    iteration, ahead = run.loop._arriving, run.loop._ahead
    assert iteration is not None and ahead is not None and run.iterations == 6
    run.loop.settle()
    ended, queued = iteration.marks.accepted, ahead.proposed.span[1]
    assert isinstance(ended, HostMark) and isinstance(queued, HostMark)
    assert run.outcomes[-1].end_s == pytest.approx(ended.time_s, abs=0.02)
    assert run.loop.free_s() == pytest.approx(queued.time_s, abs=0.02)
    assert run.outcomes[-1].since_last_s - run.outcomes[-1].total_s >= 0.05


def test_the_clock_is_right_behind_an_early_draft_that_nobody_wants() -> None:
    """The device makes it all the same, and comes to the next iteration when it is done."""
    run = Run("chain-3", overlap=True)
    for _ in range(6):
        run.step()
    last, ahead = run.loop._arriving, run.loop._ahead
    assert last is not None and ahead is not None
    run.policies.current = build_policy("none", policy_config(1))
    run.step()
    iteration = run.loop._arriving
    assert iteration is not None and iteration.plan.running.underway is None
    run.loop.settle()
    before, after = last.marks.accepted, iteration.marks.accepted
    assert isinstance(before, HostMark) and isinstance(after, HostMark)
    assert run.outcomes[-1].end_s - run.outcomes[-2].end_s == pytest.approx(after.time_s - before.time_s)


def test_prompts_that_are_read_meanwhile_are_no_part_of_the_iteration() -> None:
    """Neither of its draft nor of what comes behind it, but of the time since the last one."""
    run = Run("chain-3", overlap=True)
    for _ in range(3):
        run.step()
    time.sleep(0.3)  # a prefill
    run.step()
    run.loop.settle()
    outcome = run.outcomes[-1]
    assert outcome.plan.running.underway is not None
    assert outcome.since_last_s - outcome.total_s >= 0.3
    assert outcome.total_s >= outcome.draft_s + outcome.select_s + outcome.verify_s - 1e-6

"""While a device drafts, the host goes through what comes next with the last candidates: a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adaserve.engine.decode import DecodeLoop
from adaserve.engine.gpu.device import GpuDevice
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.trees.batch import TreeBatch
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.gpu.test_decode import Run, check_draft_cache


class Seen:
    """What a run goes through while its device is busy for as long as ``busy`` says."""

    def __init__(self, run: Run, busy: Iterator[bool], patch: pytest.MonkeyPatch) -> None:
        self.like: list[CandidateTrees | None] = []
        self.filled: list[TreeBatch] = []
        policy, fill = run.policies.current, GpuForward.fill

        def prepared(plan: Any, like: CandidateTrees | None) -> None:
            assert like is None or not {"first", "row", "above", "draft_steps"} & vars(like).keys()
            self.like.append(like)
            type(policy).prepare(policy, plan, like)

        def filled(forward: GpuForward, batch: TreeBatch) -> None:
            self.filled.append(batch)
            fill(forward, batch)

        patch.setattr(policy, "prepare", prepared)
        patch.setattr(GpuForward, "fill", filled)
        patch.setattr(GpuDevice, "is_busy", lambda device: next(busy))


def forever(value: bool) -> Iterator[bool]:
    while True:
        yield value


def done(run: Run) -> list[tuple[list[bool], list[int]]]:
    """What every iteration kept and brought."""
    return [(o.selection.keep.tolist(), o.new_tokens.tolist()) for o in run.outcomes]


@pytest.mark.parametrize("drafts", ["model", "model,suffix", "model,second"])
@pytest.mark.parametrize("policy", ["adaserve", "chain-3", "equal-greedy", "priced"])
def test_everything_comes_out_as_without(policy: str, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeLoop, "_may_go_unread", lambda *args: False)
    repeats = policy in ("chain-3", "equal-greedy")  # what the others select depends on measured times
    plain = Run(policy, overlap=True, drafts=drafts).finish() if repeats else None
    run = Run(policy, overlap=True, drafts=drafts)
    seen = Seen(run, forever(True), monkeypatch)
    run.finish().check()
    check_draft_cache(run)
    drafted = sum(outcome.trees.draft_steps > 0 for outcome in run.outcomes)
    assert len(seen.filled) >= drafted - 1 > 1, "all but the first iteration"
    assert plain is None or done(run) == done(plain)


def test_it_ends_with_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("adaserve", overlap=True)
    run.step()
    seen = Seen(run, iter([False, True, False, True, True, True, False]), monkeypatch)
    for likes, fills in ((0, 0), (0, 0), (1, 0)):
        run.step()
        assert (len(seen.like), len(seen.filled)) == (likes, fills)


def test_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of others say nothing of a selection; what is verified is laid out all the same."""
    run = Run("adaserve", overlap=True)
    run.step()
    seen = Seen(run, forever(True), monkeypatch)
    run.step()
    state = run.loop.requests.states[run.reqs[0].req_pool_idx]
    state.rid = "somebody-else"
    run.step()
    run.step()
    assert [like is None for like in seen.like] == [False, True, False]
    assert len(seen.filled) == 3
    run.finish().check()

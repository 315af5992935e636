"""Where all that is drafted is verified, the verification is queued before the host has read the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve.engine.decode import DecodeLoop
from adaserve.engine.device import Beams, Ready
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.iteration import Iteration
from adaserve.engine.sampling import Settings
from adaserve.engine.sources.search import QueuedSearch, proposal
from adaserve.engine.transfer import QueuedCopy
from adaserve.engine.trees.shape import tree_shape
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.iteration_recording import Recorder, read_recording, replay
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.selection import everything
from tests.engine.gpu.scripts import python
from tests.engine.gpu.test_decode import DEPTH, LENGTHS, TOKENS, WIDTH, Run, check_draft_cache, policy_config

ALL = len(LENGTHS) * (1 + DEPTH * WIDTH)
"""Tokens of a verification that takes everything."""


class Unread:
    """A run in which nothing is worth the wait; what was verified before it was read, and what it was."""

    def __init__(self, policy: str, patch: pytest.MonkeyPatch, overlap: bool = True, **options: Any) -> None:
        self.run, self.pairs = Run(policy, overlap, **options), list[tuple[Iteration, Iteration]]()
        drafts = len(self.run.models)
        self.run.policies.current = build_policy(policy, replace(policy_config(drafts), budget=ALL))
        inner = DecodeLoop._read

        def read(loop: DecodeLoop, iteration: Iteration) -> Iteration:
            self.pairs.append((iteration, inner(loop, iteration)))
            return self.pairs[-1][1]

        patch.setattr(DecodeLoop, "_read", read)
        patch.setattr(LearnedCosts, "select_wait_s", 1.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "policy", ["adaserve", "adaptive-verify-3", "chain-3", "equal-greedy", "fixed-tree", "priced"]
)
def test_the_same_text(policy: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's own greedy text, and a draft cache that is what it should be."""
    unread = Unread(policy, monkeypatch, overlap)
    run = unread.run.finish()
    run.check()
    check_draft_cache(run)
    drafted = sum(outcome.trees.n_nodes > 0 for outcome in run.outcomes)
    assert len(unread.pairs) == drafted > (0 if policy == "priced" else 4), "something was awaited"
    assert drafted == sum(outcome.plan.takes_all for outcome in run.outcomes)
    limited = 0
    for outcome in run.outcomes:
        trees, cap = outcome.trees, outcome.plan.cap
        within = np.ones(trees.n_nodes, np.bool_) if cap is None else trees.depth <= cap[trees.row]
        assert np.array_equal(outcome.selection.keep, within)
        limited += 0 < within.sum() < trees.n_nodes
    assert limited or policy == "priced", "no text came to its end"  # its drafts depend on measured times


def test_it_is_laid_out_as_it_would_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Unread("adaserve", monkeypatch)
    unread.run.finish()
    for before, after in unread.pairs:
        guess, known = before.verified, after.verified
        for name in ("row", "root", "node", "depth", "places"):
            assert np.array_equal(getattr(guess, name), getattr(known, name)), name
        assert guess.made_by.keys() == known.made_by.keys()
        for of_guess, of_known in zip(guess.made_by.values(), known.made_by.values(), strict=True):
            assert np.array_equal(of_guess, of_known)
        assert np.array_equal(before.selection.counts, after.selection.counts)
        assert not np.array_equal(guess.tree, known.tree), "the tokens were not known"


def test_the_device_verifies_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written itself is what the host would have sent."""
    unread, seen, trees = Unread("adaserve", monkeypatch), [], []
    fill_in = GpuForward._fill_in

    def filled(forward: GpuForward, batch: Any, packed: Any) -> None:
        fill_in(forward, batch, packed)
        width = batch.seen.shape[1]
        seen.append(
            (packed.tokens[: len(batch)].numpy().copy(), packed.seen[0, : len(batch), -width:].clone())
        )
        trees.append(batch.unread.tensors["tree"].numpy().copy())

    monkeypatch.setattr(GpuForward, "_fill_in", filled)
    unread.run.finish()
    assert len(unread.pairs) == len(seen) > 2
    depths = set()
    for (_, after), (tokens, visible), tree in zip(unread.pairs, seen, trees, strict=True):
        known: VerifyBatch = after.verified
        assert np.array_equal(known.tree, tree) and np.array_equal(known.batch.tokens, tokens)
        assert known.batch.seen is not None and np.array_equal(known.batch.seen, visible.numpy())
        depths.update(known.depth[known.parent[known.depth > 1]].tolist())
    assert depths == set(range(1, DEPTH)), "no tree was deep"


def test_it_is_queued_before_the_draft_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, order, queue, read = Unread("chain-3", monkeypatch), [], GpuForward.run, QueuedCopy.read
    run = unread.run
    for _ in range(3):  # slots may be exchanged at first
        run.step()

    def queued(self: GpuForward, *args: Any) -> Any:
        order.append("verify")
        return queue(self, *args)

    def reads(self: QueuedCopy) -> Any:
        if self._values is None:
            order.append("read " + " ".join(name for name, *_ in self._pieces))
        return read(self)

    monkeypatch.setattr(GpuForward, "run", queued)
    monkeypatch.setattr(QueuedCopy, "read", reads)
    for _ in range(2):
        run.step()
    once = ["read found", "read count emitted accepted", "verify"]
    assert sorted(order[:2]) == sorted(once[:2]) and order[2:3] == once[2:] and len(order) == 6
    assert order[3:5] == order[:2], "what the last one verified, and what came of it"


def test_some_have_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those have their root alone, between requests whose candidates nobody has read."""
    unread = Unread("chain-3", monkeypatch)
    run = unread.run
    plan = run.policies.current.plan

    def planned(running: Any, now_s: float) -> Any:
        rows = np.arange(len(running)) % 2 == 1
        made = plan(running, now_s)
        if made.then is None or not made.then.depth:
            return made
        return replace(made, then=replace(made.then, rows=rows))

    run.policies.current.plan = planned  # type: ignore[method-assign]
    run.finish().check()
    counts = [pair[0].selection.counts.tolist() for pair in unread.pairs]
    assert [0, 3, 0, 3] in counts


def offered(run: Run, batch: Any) -> dict[str, Any]:
    return {"offers": [None]}


def with_grammar(run: Run, batch: Any) -> dict[str, Any]:
    return {"grammars": object()}


def penalized(run: Run, batch: Any) -> dict[str, Any]:
    batch.reqs[0].sampling_params.frequency_penalty = 0.1
    return {}


def another_draft(run: Run, batch: Any) -> dict[str, Any]:
    run.loop.device.drafts = [*run.loop.device.drafts] * 2  # type: ignore[misc]
    return {}


def planned_on_the_host(run: Run, batch: Any) -> dict[str, Any]:
    run.loop.device.target.follows = False  # type: ignore[misc]
    return {}


@pytest.mark.parametrize("what", [offered, with_grammar, penalized, another_draft, planned_on_the_host])
def test_not_where_more_has_to_be_known(
    what: Callable[[Run, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Unread("chain-3", monkeypatch).run
    run.step()
    last, batch = run.loop._arriving, run.batch()
    assert last is not None
    assert may_go_unread(run, batch, last)
    assert not may_go_unread(run, batch, last, **what(run, batch))


def may_go_unread(run: Run, batch: Any, last: Iteration, offers: Any = (), grammars: Any = None) -> bool:
    rows = replace(last.rows, grammars=grammars)
    return run.loop._may_go_unread(rows, offers, Settings.of(batch.reqs))


def test_a_host_reads_its_own_drafts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Unread("chain-3", monkeypatch, device="host")
    unread.run.finish().check()
    assert not unread.pairs and not any(outcome.plan.takes_all for outcome in unread.run.outcomes)


def test_the_end_of_a_text_awaits_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone request's last token may be there before its client's. Nothing is selected from the draft that
    was made behind it, which nobody has to wait for."""
    run, read, made = Run("adaserve", overlap=True), QueuedCopy.read, []
    for _ in range(4):
        run.step()
    for req, got in zip(run.reqs, run.got, strict=True):
        req.sampling_params.max_new_tokens = len(got)

    def reads(self: QueuedCopy) -> Any:
        if self._values is None:
            made.append(" ".join(name for name, *_ in self._pieces))
        return read(self)

    assert run.loop._ahead is not None
    monkeypatch.setattr(QueuedCopy, "read", reads)
    run.loop.decode(run.batch(), None)
    last = run.loop._arriving
    assert last is not None and last.plan.draft.depth and not last.unread and not last.verified.deepest
    assert "found" not in made
    run.loop.settle()
    for got, expected in zip(run.got, run.expected, strict=True):
        assert got == expected[: len(got)]


def test_one_that_ends_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its candidates are not verified, theirs are."""
    unread = Unread("chain-3", monkeypatch)
    unread.run.reqs[1].sampling_params.max_new_tokens = 9
    unread.run.finish()
    caps = [pair[0].plan.cap for pair in unread.pairs]
    counts = [pair[0].selection.counts.tolist() for pair in unread.pairs]
    assert [3, 0, 3, 3] in counts and any(cap is not None and not cap[1] for cap in caps)
    for r in (0, 2, 3):
        assert unread.run.got[r][:TOKENS] == unread.run.expected[r]


@pytest.mark.parametrize("policy", ["adaserve", "priced"])
def test_a_recording_replays(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is asked for its selection when the outcome is there."""
    unread, path = Unread(policy, monkeypatch), tmp_path / "run.jsonl"
    with Recorder(path) as unread.run.loop.decisions.recorder:
        unread.run.finish()
    assert unread.pairs and len(list(read_recording(path))) == unread.run.iterations
    assert replay(path, build_policy(policy, replace(policy_config(), budget=ALL))) == []


def test_the_policy_may_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that planned is asked for the selection."""
    unread = Unread("chain-3", monkeypatch)
    run, asked = unread.run, []
    for _ in range(4):
        run.step()
    first = run.policies.current
    select = first.select
    monkeypatch.setattr(first, "select", lambda *a: asked.append(first) or select(*a))
    run.policies.current = build_policy("none", policy_config(1))
    run.step()
    assert asked == [first]
    run.finish().check()


def test_an_outline() -> None:
    """Two of four requests have candidates, in another order than in the search."""
    shape, rows, mine = tree_shape(2, 2, None), np.array([1, 3]), np.array([1, 0])
    tokens = np.arange(8).reshape(2, 4)
    beams = Beams(tokens, np.array([[-1, -1, 0, 1]] * 2), -0.1 * tokens, 2)
    found: Any = object()
    pending = QueuedSearch(Ready(lambda: beams, found), shape, rows, mine, 4).pending()
    assert pending.unread is not None
    unread, known = pending.unread(), pending.read()
    assert unread.found is found and unread.of.tolist() == [-1, 1, -1, 0]
    assert known.trees.token.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    for name in ("row_start", "depth"):
        assert np.array_equal(getattr(unread.outline.trees, name), getattr(known.trees, name))
    assert np.array_equal(unread.outline.column, known.column) and unread.outline.width == known.width
    assert unread.columns.tolist() == shape.columns.tolist()
    host = QueuedSearch(Ready(lambda: beams), shape, rows, mine, 4).pending()
    assert host.unread is None


def test_everything() -> None:
    """Expected tokens are those of the candidates' own probabilities; what is not a number is worth 0."""
    shape, nan = tree_shape(2, 1, None), float("nan")
    beams = Beams(np.zeros((2, 2), np.int64), np.array([[-1, 0]] * 2), np.log([[0.5, 0.25], [nan, nan]]), 2)
    trees = proposal(shape, np.array([0, 2]), beams, 3).trees
    taken = everything(trees, None)
    assert taken.keep.all() and taken.counts.tolist() == [2, 0, 2] and not taken.slo_counts.any()
    assert taken.expected_tokens.tolist() == [1.75, 1.0, 1.0]
    assert taken.verify_tokens == 7
    some = everything(trees, np.array([1, 5, 0]))
    assert some.keep.tolist() == [True, False, False, False] and some.counts.tolist() == [1, 0, 0]
    assert some.expected_tokens.tolist() == [1.5, 1.0, 1.0]


KERNELS = """
import torch
from adaserve.bench.gpu_check.unread_kernel import check_unread

for sizes in ((1, 1, 1), (1, 5, 3), (5, 4, 2), (9, 3, 8)):
    found = check_unread(*sizes, torch.device("cpu"))
    assert found["right"], found
"""


COMPILED = """
import torch
from adaserve.engine.gpu.unread_kernel import _write
from tests.engine.gpu.compiling import compiles_once

numbers, bools, cases = torch.zeros(9).long(), torch.zeros(99, dtype=torch.uint8), []
for start, size in ((0, 1), (1, 2), (2, 16)):
    there = [numbers[start:], numbers.double()[start:], *[numbers[start:]] * 6]
    sizes = 64 * size, size, size, size, 16 * size, 128_255, -1
    cases.append((*there, bools[start:], *sizes))
assert compiles_once(_write, *cases)
"""


def test_the_kernel_does_the_same() -> None:
    python(KERNELS, interpret=True)


def test_the_kernel_compiles_once_whatever_is_drafted() -> None:
    """And for compute capability 9.0."""
    python(COMPILED, interpret=False)

"""Ranks that measure different times follow the first one: real gloo groups of two processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from adaserve.engine.decisions import Decisions
from adaserve.engine.gpu.graphs import MIN_FREE_BYTES, GraphTable, capture_all, least_of
from adaserve.engine.rank_sync import RankSync
from adaserve.scheduler.costs.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from adaserve.scheduler.selection import everything
from tests.engine.gpu.scripts import python
from tests.engine.trees.factories import decode_rows, drafted, running


class GlooGroup:
    """The one call of SGLang's ``GroupCoordinator``, over gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size = rank, size
        self.cpu_group: Any = None  # all ranks

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]


def rank(number: int, rendezvous: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    rank_sync = RankSync(GlooGroup(number, 2))
    # Another clock and another speed on each rank: alone they would plan and select differently.
    policy = build_policy("adaserve", PolicyConfig(latency=default_latency(), budget=12 + 30 * number))
    batch = dataclasses.replace(
        running(4), decode_start_s=np.full(4, -10.0 * number), tpot_slo_s=np.full(4, 0.05)
    )
    trees = drafted(decode_rows([5, 9, 3, 7]), 3, 3).trees
    plan = rank_sync.plan(lambda: policy.plan(batch, 5.0 + number), batch)
    assert plan.running is batch
    own = policy.plan(batch, 5.0 + number)
    selection = rank_sync.decide(lambda: policy.select(plan, trees))
    lone = policy.select(own, trees)
    # Memory for one graph on the first rank, and for two on the second one.
    free = iter(MIN_FREE_BYTES + delta for delta in ([5, -1, -2], [6, 5, -2])[number])
    captured: list[int] = []
    capture_all(
        "draft", [3, 2, 1], captured.append, GraphTable(capture=True),
        lambda: least_of(GlooGroup(number, 2), next(free)),
    )  # fmt: skip
    torch.save(
        {
            "plan": [plan.draft.depth, plan.draft.width, plan.budget, plan.now_s],
            "own": [own.draft.depth, own.draft.width, own.budget, own.now_s],
            "selection": dataclasses.astuple(selection), "own_keep": lone.keep, "captured": captured,
        },
        f"{out}/{number}",
    )  # fmt: skip
    dist.destroy_process_group()


IMPORTS = "import torch.multiprocessing as mp; from tests.engine.gpu.test_rank_sync import rank"


def test_two_ranks(tmp_path: Path) -> None:
    """Forked where SGLang is imported and nobody else runs; no kernel is interpreted."""
    arguments = (str(tmp_path / "rendezvous"), str(tmp_path))
    start = f"mp.start_processes(rank, {arguments}, nprocs=2, start_method='fork')"
    python(f"{IMPORTS}\n{start}", interpret=True)
    one, two = (torch.load(tmp_path / str(n), weights_only=False) for n in range(2))
    assert one["own"] != two["own"] and one["plan"] == two["plan"] == one["own"]
    assert not np.array_equal(one["own_keep"], two["own_keep"])
    assert np.array_equal(one["selection"][0], one["own_keep"])
    for a, b in zip(one["selection"], two["selection"], strict=True):
        assert np.array_equal(a, b)
    assert one["captured"] == two["captured"] == [3], "a forward that one rank runs alone waits for ever"


def test_alone_nothing_is_sent() -> None:
    rank_sync = RankSync(GlooGroup(0, 1))
    assert rank_sync.alone and rank_sync.decide(lambda: 3) == 3


def test_of_what_is_taken_unread_the_first_rank_tells_what_its_policy_expects() -> None:
    """As of a selection: the metrics are of the first rank."""
    trees = drafted(decode_rows([5, 9, 3, 7]), 3, 3).trees
    plan = build_policy("chain-3").plan(running(4), 1.0)
    expects = dataclasses.replace(everything(trees, plan.cap), expected_tokens=np.full(4, 1.25))
    policy: Any = SimpleNamespace(select=lambda plan, trees: expects)
    first, second = (Decisions(SimpleNamespace(), RankSync(GlooGroup(n, 2)), None) for n in range(2))  # type: ignore[arg-type]
    assert first.take_all(policy, plan, trees) is expects
    assert np.array_equal(second.take_all(policy, plan, trees).keep, expects.keep)

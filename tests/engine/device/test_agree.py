"""Ranks that measure different times follow the first one: real gloo groups of two processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adaserve.engine.device.agree import Agreement
from adaserve.engine.device.choose import Choice, choose
from adaserve.engine.device.selection import Kept
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from tests.engine.device.test_selection import random_beam, running, to_device


class GlooGroup:
    """The two calls of SGLang's ``GroupCoordinator``, over gloo."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size = rank, size

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(input_, src=src)
        return input_


def rank(number: int, rendezvous: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    agreement = Agreement(GlooGroup(number, 2))
    # Another clock and another speed on each rank: alone they would plan and select differently.
    latency = default_latency()
    policy = build_policy("adaserve", PolicyConfig(latency=latency, budget=12 + 30 * number))
    batch = dataclasses.replace(running(4), decode_start_s=np.full(4, -10.0 * number))
    trees = random_beam(np.random.default_rng(3), 4, 3, 2)
    grid = to_device(trees)
    plan = agreement.plan(lambda: policy.plan(batch, 5.0 + number), batch)
    assert plan.running is batch
    own = policy.plan(batch, 5.0 + number)
    choice = agreement.choice(lambda: choose(policy, plan, grid, trees.n_nodes), lambda: Kept.nothing(grid))
    lone = choose(policy, own, grid, trees.n_nodes)
    torch.save(
        {
            "plan": [plan.depth, plan.width, plan.budget, plan.need.tolist(), plan.now_s],
            "own": [own.depth, own.width, own.budget, own.need.tolist(), own.now_s],
            "keep": choice.kept.keep, "counts": choice.counts, "slo": choice.kept.slo_counts,
            "expected": choice.kept.expected, "own_keep": lone.kept.keep,
        },
        f"{out}/{number}",
    )  # fmt: skip
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / str(n), weights_only=False) for n in range(2))
    assert one["own"] != two["own"] and one["plan"] == two["plan"] == one["own"]
    assert not torch.equal(one["own_keep"], two["own_keep"])
    assert torch.equal(one["keep"], two["keep"]) and torch.equal(one["keep"], one["own_keep"])
    assert one["counts"].tolist() == two["counts"].tolist() == one["keep"].sum(1).tolist()
    assert torch.equal(one["slo"], two["slo"]) and torch.equal(one["expected"], two["expected"])


def test_alone_nothing_is_sent() -> None:
    agreement = Agreement(GlooGroup(0, 1))
    choice = Choice(Kept.nothing(to_device(random_beam(np.random.default_rng(0), 2, 2, 2))), np.zeros(2))
    assert agreement.choice(lambda: choice, lambda: choice.kept) is choice

"""One rank on a CPU host has one process group (patches/start/gloo_threads.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from adaserve.patches.start.gloo_threads import _shared


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def threads() -> int:
    """How many look for messages of gloo's."""
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def test_groups_of_one_rank_have_one_thread(one_rank: None) -> None:
    until = time.monotonic() + 10
    while not (before := threads()) and time.monotonic() < until:
        time.sleep(0.01)  # a thread names itself, some time after it was started
    groups = [_shared(dist.new_group, [0], backend="gloo", group_desc=f"{i}:cpu") for i in range(4)]
    assert threads() == before > 0
    assert all(dist.get_world_size(g) == 1 and dist.get_backend(g) == "gloo" for g in groups)


def test_another_backend_has_a_group_of_its_own(one_rank: None) -> None:
    assert _shared(lambda ranks, timeout, backend, **_: (ranks, backend), [0], backend="nccl") == (
        [0],
        "nccl",
    )


def test_several_ranks_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert _shared(lambda ranks, timeout, backend, **_: ranks, [0], backend="gloo") == [0]

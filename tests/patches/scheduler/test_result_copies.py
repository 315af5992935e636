"""Results are copied behind their own iteration, not behind the draft that was queued after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler

from adaserve.engine.device_timing import HostMark
from adaserve.patches.scheduler import result_copies


def scheduler_like(waited: list[Any]) -> Any:
    """Whose streams note what they wait for."""

    class Copies:
        wait_event = staticmethod(waited.append)
        wait_stream = torch.cuda.Stream.wait_stream

        def __enter__(self) -> None: ...
        def __exit__(self, *error: Any) -> None: ...

    stream = Copies()
    forwards = SimpleNamespace(record_event=lambda: "all that is queued")
    return SimpleNamespace(
        copy_stream=stream, copy_stream_ctx=stream, forward_stream=forwards, enable_async_d2h_copy=False
    )


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_waits_for_its_own_iteration(is_ours: bool, fails: bool) -> None:
    waited: list[Any] = []
    copied: list[bool] = []

    def copy_to_cpu(**options: Any) -> None:
        if fails:
            raise RuntimeError("no memory")
        copied.append(True)

    scheduler, result = scheduler_like(waited), SimpleNamespace(copy_to_cpu=copy_to_cpu)
    stream = scheduler.forward_stream
    result_copies.allow_behind(result, SimpleNamespace(event="the outcome") if is_ours else HostMark())
    batch = SimpleNamespace(return_logprob=False, return_hidden_states=False)
    original = getattr(Scheduler._copy_result_to_cpu, "__wrapped__", Scheduler._copy_result_to_cpu)
    try:
        result_copies._copy(original, scheduler, result, batch)
    except RuntimeError:
        assert fails
    assert waited == ["the outcome" if is_ours else "all that is queued"]
    assert scheduler.forward_stream is stream and copied == [True] * (not fails)

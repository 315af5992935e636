"""However long a client leaves its stream unread, one output waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from adaserve.patches.http.slow_readers import _newest_alone


def waiting(*, incremental: bool) -> list[int]:
    """What waits for a client that has read none of three outputs."""
    state = SimpleNamespace(out_list=[])
    manager = SimpleNamespace(rid_to_state={"unread": state}, incremental_streaming_output=incremental)

    async def handle(manager: Any, outputs: Any) -> None:
        manager.rid_to_state["unread"].out_list.append(outputs.number)

    async def serve() -> None:
        for number in range(3):
            outputs = SimpleNamespace(rids=["ended meanwhile", "unread"], number=number)
            await _newest_alone(handle, manager, outputs)

    asyncio.run(serve())
    return state.out_list


def test_the_newest_output_waits() -> None:
    assert waiting(incremental=False) == [2]


def test_parts_that_are_all_needed_wait() -> None:
    assert waiting(incremental=True) == [0, 1, 2]

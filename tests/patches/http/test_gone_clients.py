"""Which requests are aborted once a client has gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.background import BackgroundTasks
from starlette.requests import Request

from adaserve.patches.http import gone_clients
from adaserve.patches.http.gone_clients import _behind_a_stream, _watch


def aborted(*, ended: str = "", background: bool = False) -> list[str]:
    """Of samples a and b, whose client leaves. One that has ``ended`` by then has left its id to another."""
    seen: list[str] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def serve() -> None:
        manager = SimpleNamespace(rid_to_state={"a": object(), "b": object()}, abort_request=seen.append)
        request = Request({"type": "http"}, receive)
        for rid in ("a", "b"):
            _watch(None, manager, SimpleNamespace(rid=rid, background=background), request)
        await asyncio.sleep(0)
        assert not seen
        if ended:
            manager.rid_to_state[ended] = object()
        gone.set()
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    return seen


def test_every_sample_ends() -> None:
    assert aborted() == ["a", "b"]


def test_what_has_ended_is_not_aborted() -> None:
    assert aborted(ended="a") == ["b"]


def test_what_runs_in_the_background_goes_on() -> None:
    assert aborted(background=True) == []


@pytest.mark.parametrize(
    ("rid", "aborted"),
    [("left", ["left"]), ("over", []), ("another's", []), (["left", "over", "another's"], ["left"])],
)
def test_behind_a_stream_nobody_is_aborted_who_has_its_id_by_then(
    rid: str | list[str], aborted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gone_clients, "LEFT_S", 0.01)
    seen: list[str] = []
    manager = SimpleNamespace(
        rid_to_state={"left": object(), "another's": object()},
        abort_request=seen.append,
    )
    obj = SimpleNamespace(rid=rid, is_single=isinstance(rid, str))

    async def behind() -> None:
        tasks = _behind_a_stream(lambda *_: BackgroundTasks(), manager, obj)
        ended = asyncio.create_task(tasks())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        manager.rid_to_state |= {"over": object(), "another's": object()}
        await ended

    asyncio.run(behind())
    assert seen == aborted

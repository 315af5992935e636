"""What is added to SGLang's app and to bodies."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server

from adaserve.commands import COULD_NOT
from adaserve.patches.http import admin_access, bodies, cached_status
from adaserve.patches.start import http_app_setup


def before_run(monkeypatch: pytest.MonkeyPatch, port: int = 0) -> FastAPI:
    app = FastAPI()
    for path in (admin_access.CONTROL_PATH, admin_access.ABORT_PATH, *cached_status.SERVER_INFO):
        app.add_api_route(path, lambda: None)
    app.add_exception_handler(HTTPException, lambda *_: None)
    app.add_exception_handler(RequestValidationError, lambda *_: None)
    monkeypatch.setattr(http_server, "app", app)
    monkeypatch.delenv(http_app_setup.APP_PATH, raising=False)
    for _ in range(2):
        http_app_setup._before_run(SimpleNamespace(host="127.0.0.1", port=port), None)
    return app


def test_the_page_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = before_run(monkeypatch)
    assert [getattr(route, "path", "") for route in app.routes].count("/slo/snapshot.json") == 1
    assert TestClient(app).get("/slo").status_code == 200
    assert TestClient(app).post("/slow_down").status_code == 400
    assert os.environ[http_app_setup.APP_PATH] == http_app_setup.APP


def test_a_server_whose_port_was_taken_meanwhile_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(http_app_setup, "end_children", ended.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"^{COULD_NOT}$"):
            before_run(monkeypatch, port)
    assert capsys.readouterr().err == f"adaserve: port {port} is in use: choose another with --port\n"
    assert ended == [os.getpid()]


def test_null_is_dropped() -> None:
    async def parsed(_: Any) -> dict[str, Any]:
        return {"n": None}

    request = SimpleNamespace(scope={"path": "/v1/completions"})
    assert asyncio.run(bodies._parsed(parsed, request)) == {}


def test_bodies_that_stay_unfinished_have_a_limit_together() -> None:
    """Clients that never send the rest must not fill the memory. What comes in one piece is served."""

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    app = bodies.Unfinished(read, most_bytes=100)

    async def sent(*sizes: int, ends: bool = True) -> None:
        parts = [{"type": "http.request", "body": b"a" * size, "more_body": True} for size in sizes]
        parts[-1]["more_body"] = not ends

        async def receive() -> Any:
            return parts.pop(0) if parts else await asyncio.Event().wait()

        await app({}, receive, None)

    async def main() -> None:
        await sent(60, 40)
        stuck = asyncio.create_task(sent(60, ends=False))
        await asyncio.sleep(0)
        await sent(200)
        await sent(40, 40)
        for _ in range(2):
            with pytest.raises(HTTPException, match="503: too many large requests have arrived only in part"):
                await sent(41, 0)
        stuck.cancel()
        await asyncio.wait({stuck})
        await sent(60, 40)

    asyncio.run(main())


async def answered(app: Any, receive: Any) -> int:
    try:
        await app({"type": "http"}, receive, None)
    except HTTPException as refused:
        return refused.status_code
    return 200


def test_a_body_that_stalls_gives_its_share_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-three clients that never sent the rest of 31 MB shut all others with large bodies out."""
    monkeypatch.setattr(bodies, "MIN_PIECE_BYTES", 30)

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    app = bodies.Unfinished(read, most_bytes=100, piece_s=0.5)

    def sending(*parts: tuple[float, int], ends: bool = False) -> Any:
        """``parts``: seconds after the one before, and bytes."""
        left = list(parts)

        async def receive() -> Any:
            if not left:
                await asyncio.Event().wait()
            pause_s, size = left.pop(0)
            await asyncio.sleep(pause_s)
            return {"type": "http.request", "body": b"a" * size, "more_body": bool(left) or not ends}

        return receive

    async def main() -> None:
        stalled = asyncio.create_task(answered(app, sending((0, 90))))
        await asyncio.sleep(0.05)
        assert await answered(app, sending((0, 11), (0, 11), ends=True)) == 503
        assert await stalled == 408
        assert await answered(app, sending((0, 50), (0, 50), ends=True)) == 200
        assert await answered(app, sending()) == 408, "nothing of it has come"
        trickle = ((0, 20), *[(0.1, 1)] * 10)
        assert await answered(app, sending(*trickle, ends=True)) == 408, "a byte at a time holds its share"
        assert await answered(app, sending(*[(0.15, 16)] * 5, ends=True)) == 200, "slow, and fast enough"
        assert app._held_bytes == 0

    asyncio.run(main())


def test_a_client_may_wait_for_its_answer_as_long_as_it_likes() -> None:
    async def listen(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"

    async def main() -> None:
        messages = [{"type": "http.request", "body": b"a", "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            message = messages.pop(0)
            await asyncio.sleep(0 if messages else 0.1)
            return message

        assert await answered(bodies.Unfinished(listen, piece_s=0.01), receive) == 200

    asyncio.run(main())

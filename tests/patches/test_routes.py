"""Which of SGLang's routes a server refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from adaserve.host import PROFILE_ROUTES_ENV
from adaserve.patches import routes


@pytest.mark.parametrize(
    ("path", "allowed", "passes"),
    [
        ("/start_profile", "1", True),
        ("/stop_profile", "1", True),
        ("/start_profile", "", False),
        ("/slow_down", "1", False),
        ("/generate", "", True),
    ],
)
def test_profiles_are_for_those_who_start_the_server(
    path: str, allowed: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE_ROUTES_ENV, allowed)
    monkeypatch.setattr(routes, "_active", lambda: True)
    passed, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    async def receive() -> Any:
        raise AssertionError("nobody reads the body")

    asyncio.run(routes.Routes(app)({"type": "http", "path": path}, receive, send))
    assert bool(passed) is passes and (sent[:1] == ([] if passes else [400]))

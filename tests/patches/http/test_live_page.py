"""Who sees the snapshot and who may change the server, on SGLang's own app with its own middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level

from adaserve.patches.http import admin_access, live_page

CONTEXT = "sglang.srt.runtime_context"
LOCAL, FAR = ("127.0.0.1", 4000), ("10.0.0.7", 4000)


class Site:
    """The routes that matter, guarded as SGLang guards them and then as we do."""

    def __init__(self, patch: pytest.MonkeyPatch, api_key: str | None, admin_key: str | None) -> None:
        self.app, self.made, self.changed = FastAPI(), 0, 0
        self.aborted: list[AbortReq] = []

        @self.app.post("/set_internal_state")
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def change() -> list[bool]:
            self.changed += 1
            return [True]

        @self.app.post("/abort_request")
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def abort(obj: Annotated[AbortReq, Body()]) -> bool:
            self.aborted.append(obj)
            return True

        async def make() -> dict[str, Any]:
            self.made += 1
            await asyncio.sleep(0.01)
            return {"made": self.made}

        keys = SimpleNamespace(api_key=api_key, admin_api_key=admin_key)
        patch.setattr(f"{CONTEXT}.get_serving", lambda: keys)
        patch.setattr(live_page, "_make", make)
        patch.setattr(live_page, "_latest", live_page._Latest())
        live_page.mount(self.app)
        admin_access.mount(self.app)
        if api_key or admin_key:
            add_api_key_middleware(self.app, api_key=api_key, admin_api_key=admin_key)

    def get(self, path: str, key: str | None = None, **headers: str) -> int:
        return self._send("GET", path, LOCAL, key, headers)

    def change(self, key: str | None = None, client: tuple[str, int] = LOCAL, **headers: str) -> bool:
        before, status = self.changed, self._send("POST", "/set_internal_state", client, key, headers)
        assert (status == 200) == (self.changed > before), status
        return status == 200

    def abort(self, content: str | bytes, key: str | None = None, client: tuple[str, int] = LOCAL) -> bool:
        """Whether SGLang's own route was asked."""
        before = len(self.aborted)
        headers = {"content-type": "application/json"}
        self._send("POST", "/abort_request", client, key, headers, content)
        return len(self.aborted) > before

    def _send(
        self,
        method: str,
        path: str,
        client: tuple[str, int],
        key: str | None,
        headers: dict[str, str],
        content: str | bytes = b"",
    ) -> int:
        async def send() -> int:
            transport = httpx.ASGITransport(self.app, client=client)
            base = "http://127.0.0.1:30000"
            given = {"authorization": f"Bearer {key}"} if key else {}
            named = {k.replace("_", "-"): v for k, v in headers.items()}
            async with httpx.AsyncClient(transport=transport, base_url=base) as http:
                return (
                    await http.request(method, path, headers={**given, **named}, content=content)
                ).status_code

        return asyncio.run(send())


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    return lambda api_key=None, admin_key=None: Site(monkeypatch, api_key, admin_key)


def test_without_keys_only_programs_on_this_machine_change_anything(site: Callable[..., Site]) -> None:
    s = site()
    assert s.change() and s.change(client=("::1", 1)) and s.change(client=("::ffff:127.0.0.1", 1))
    assert not s.change(client=FAR)
    assert not s.change(x_forwarded_for="10.0.0.7"), "a proxy on this machine speaks for somebody else"
    assert s.change(origin="http://127.0.0.1:30000"), "a page of the server itself"
    for origin in ("https://evil.example", "null", "http://127.0.0.1:8000", "http://localhost:30000"):
        assert not s.change(origin=origin), origin
    rebound = {"origin": "http://evil.example:30000", "host": "evil.example:30000"}
    assert not s.change(**rebound), "a name of theirs that points here is of the same origin"


def test_with_keys_only_the_admin_changes_anything(site: Callable[..., Site]) -> None:
    client = site(api_key="user")
    assert not client.change() and not client.change("user")
    for keys in ({"admin_key": "root"}, {"api_key": "user", "admin_key": "root"}):
        s = site(**keys)
        assert s.change("root") and s.change("root", client=FAR)
        assert not s.change() and not s.change("user") and not s.change("roo")


ALL = '{"abort_all": true}'


def test_everybodys_requests_are_aborted_by_the_admin_only(site: Callable[..., Site]) -> None:
    s = site()
    assert s.abort(ALL) and not s.abort(ALL, client=FAR)
    for alike in ('{"abort_all": "yes"}', '{"abort_all": 1, "rid": "a"}', ALL.encode("utf-16"), "[NaN]"):
        assert not s.abort(alike, client=FAR), alike
    assert s.abort('{"rid": "a"}', client=FAR) and s.aborted[-1].rid == "a"
    with_key = site(api_key="user", admin_key="root")
    assert with_key.abort(ALL, "root") and not with_key.abort(ALL, "user")


def test_the_snapshot_wants_the_key_that_there_is(site: Callable[..., Site]) -> None:
    path = "/slo/snapshot.json"
    assert site().get(path) == 200
    for name, key in (("api_key", "user"), ("admin_key", "root")):
        s = site(**{name: key})
        assert [s.get(path), s.get(path, "wrong"), s.get(path, key)] == [401, 401, 200]
        assert s.get("/slo") == 200, "the page itself asks for the key"
    both = site(api_key="user", admin_key="root")
    assert [both.get(path), both.get(path, "user")] == [401, 200]


def test_the_snapshot_is_made_once_a_second_for_everybody(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, now = site(), [100.0]
    monkeypatch.setattr(live_page, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def many() -> None:
        transport = httpx.ASGITransport(s.app, client=FAR)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
            await asyncio.gather(*(http.get("/slo/snapshot.json") for _ in range(20)))

    asyncio.run(many())
    assert s.made == 1
    now[0] += 0.9
    s.get("/slo/snapshot.json")
    assert s.made == 1
    now[0] += 0.2
    s.get("/slo/snapshot.json")
    assert s.made == 2


def test_a_scheduler_that_hangs_is_asked_once_and_the_page_is_told(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, asked = site(), 0
    monkeypatch.setattr(live_page, "PATIENCE_S", 0.05)

    async def ask() -> list[int]:
        awake = asyncio.Event()

        async def make() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            await awake.wait()
            return {}

        monkeypatch.setattr(live_page, "_make", make)
        transport = httpx.ASGITransport(s.app, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
            codes = [(await http.get("/slo/snapshot.json")).status_code for _ in range(2)]
            awake.set()
            monkeypatch.setattr(live_page, "PATIENCE_S", 60.0)
            return [*codes, (await http.get("/slo/snapshot.json")).status_code]

    assert asyncio.run(ask()) == [503, 503, 200]
    assert asked == 1


def test_the_guarded_route_is_sglangs() -> None:
    from sglang.srt.entrypoints.http_server import app

    routes = [r for r in app.router.routes if getattr(r, "path", None) == admin_access.CONTROL_PATH]
    assert len(routes) == 1, f"{admin_access.CONTROL_PATH} moved: anybody could change the policy"

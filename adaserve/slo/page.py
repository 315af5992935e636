"""The page at ``/slo`` and the JSON behind it.

The page itself holds no figures, so it is served without authentication; ``/slo/snapshot.json``
goes through the server's own authentication, and the page asks for the key when it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any

PAGE_PATH = "/slo"
SNAPSHOT_PATH = "/slo/snapshot.json"

SnapshotProvider = Callable[[], Awaitable[dict[str, Any]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@functools.cache
def page_html() -> bytes:
    """The whole page, with uPlot inside."""
    static = resources.files("adaserve.slo") / "static"

    def read(name: str) -> str:
        return (static / name).read_text(encoding="utf-8")

    html = read("page.html").replace("/*UPLOT_CSS*/", read("uPlot.min.css"))
    return html.replace("/*UPLOT_JS*/", read("uPlot.iife.min.js")).encode()


class PageMiddleware:
    """ASGI middleware that answers ``GET /slo`` before any authentication sees it.

    Add it last (``app.add_middleware(PageMiddleware)``): the last one added is the outermost."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if not wanted or scope["path"].removeprefix(scope.get("root_path", "")) != PAGE_PATH:
            await self.app(scope, receive, send)
            return
        body = page_html()
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-cache"),
            (b"x-content-type-options", b"nosniff"),
            (b"content-security-policy", _POLICY),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


# Everything is in the page; only the snapshot is fetched, from the same server.
_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def add_snapshot_route(app: Any, snapshot: SnapshotProvider) -> None:
    """Adds ``/slo/snapshot.json`` to a FastAPI app. ``snapshot`` returns ``Snapshot.to_json()``."""
    from fastapi.responses import JSONResponse

    async def snapshot_json() -> JSONResponse:
        return JSONResponse(await snapshot(), headers={"Cache-Control": "no-store"})

    app.add_api_route(SNAPSHOT_PATH, snapshot_json, methods=["GET"], include_in_schema=False)


def mount(app: Any, snapshot: SnapshotProvider) -> None:
    """Page and snapshot on a FastAPI app, before it serves. Call it after authentication was added;
    where that is not possible add the two parts at different times."""
    add_snapshot_route(app, snapshot)
    app.add_middleware(PageMiddleware)

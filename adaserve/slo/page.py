"""The page at ``/slo`` and the JSON behind it.

The page itself holds no figures, so it is served without authentication; ``/slo/snapshot.json``
goes through the server's own authentication, and the page asks for the key when it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adaserve.asgi import put_around, route_path

PAGE_PATH = "/slo"
SNAPSHOT_PATH = "/slo/snapshot.json"

# Everything is in the page; only the snapshot is fetched, from the same server.
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
}


@functools.cache
def page_html() -> bytes:
    """The whole page, with uPlot inside."""
    static = resources.files("adaserve.slo") / "static"

    def read(name: str) -> str:
        return (static / name).read_text(encoding="utf-8")

    html = read("page.html").replace("/*UPLOT_CSS*/", read("uPlot.min.css"))
    return html.replace("/*UPLOT_JS*/", read("uPlot.iife.min.js")).encode()


def mount(app: FastAPI, snapshot: Callable[[Request], Awaitable[dict[str, Any]]]) -> None:
    """Adds page and snapshot to an app, before it serves. ``snapshot`` returns ``Snapshot.to_json()``."""

    async def snapshot_json(request: Request) -> JSONResponse:
        return JSONResponse(await snapshot(request), headers={"Cache-Control": "no-store"})

    app.add_api_route(SNAPSHOT_PATH, snapshot_json, methods=["GET"], include_in_schema=False)
    put_around(app, _page_before)


def _page_before(app: ASGIApp) -> ASGIApp:
    """Answers ``GET /slo`` before any authentication sees it."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if wanted and route_path(scope) == PAGE_PATH:
            page = Response(page_html(), media_type="text/html", headers=_HEADERS)
            await page(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve

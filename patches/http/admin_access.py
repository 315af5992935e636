"""Who may change the policy and the prefills of a running server, and who may abort everybody's requests.

Why: without an admin key SGLang lets everybody who may send requests call ``/set_internal_state``, and its
CORS headers let any web page do so from a browser on this machine. ``/abort_request`` with ``abort_all`` is
just as open. Both affect all users, so with ADASERVE they need the admin key; or, on a server without any
key, a program on the same machine.
"""

from __future__ import annotations

from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from sglang.srt.utils.auth import AuthLevel, decide_request_auth
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve.asgi import route_path
from adaserve.patches import wrap_routes
from adaserve.patches.http import validation
from adaserve.slo.resolve import came_through_a_proxy

CONTROL_PATH = "/set_internal_state"
ABORT_PATH = "/abort_request"


def mount(app: Any) -> None:
    """Puts the rule in front of SGLang's routes, before the app serves."""
    wrap_routes(app, (CONTROL_PATH, ABORT_PATH), _guarded)


def _guarded(app: ASGIApp) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        from sglang.srt.runtime_context import get_serving

        request, keys = Request(scope, receive), get_serving()
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        reason = None
        if route_path(scope) != ABORT_PATH or _aborts_all(body):
            reason = refusal(request, keys.api_key, keys.admin_api_key)
        answer: ASGIApp = app if reason is None else validation.refusal(reason, HTTPStatus.FORBIDDEN)
        await answer(scope, _replayed(body, receive), send)

    return serve


def _aborts_all(body: bytes) -> bool:
    """As SGLang's route reads it, which takes "yes" and 1 as well. True also for what only it might read."""
    from sglang.srt.managers.io_struct import AbortReq

    try:
        return bool(TypeAdapter(AbortReq).validate_json(body).abort_all)
    except ValidationError:
        return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, for the app that it is passed on to."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def refusal(request: Request, api_key: str | None, admin_key: str | None) -> str | None:
    """Why a request may not change the server; None = it may."""
    if admin_key:
        return None if has_admin_key(request, admin_key) else "this needs the server's admin key"
    if api_key:
        return "this needs an admin key, and the server has none: start it with --admin-api-key"
    if not _from_here(request):
        return (
            "without keys this is for programs on the server's own machine: start it with --admin-api-key to "
            "allow it from elsewhere"
        )
    return None


def has_admin_key(request: Request, admin_key: str) -> bool:
    return decide_request_auth(
        method=request.method,
        path=CONTROL_PATH,
        authorization_header=request.headers.get("authorization"),
        api_key=None,
        admin_api_key=admin_key,
        auth_level=AuthLevel.ADMIN_FORCE,
    ).allowed


def _from_here(request: Request) -> bool:
    """Sent on this machine, and not by a web page of another origin."""
    if request.client is None or not _loopback(request.client.host):
        return False
    if came_through_a_proxy(request.headers):  # on this machine, for somebody elsewhere
        return False
    origin = request.headers.get("origin")  # browsers send it with every POST and PUT
    # A page whose own name points to this machine would have the same origin, under that name.
    own = f"{request.url.scheme}://{request.headers.get('host')}"
    return origin is None or (origin == own and _loopback(urlsplit(origin).hostname or ""))


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback

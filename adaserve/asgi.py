"""Reads requests from their ASGI scope, and wraps ASGI apps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def route_path(scope: Mapping[str, Any]) -> str:
    """The path as routes are named, without the prefix of ``--fastapi-root-path``."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def put_around(app: Any, wrap: Callable[[Any], Any]) -> None:
    """Puts an ASGI app around Starlette's ``app`` with all of its middleware, before it serves.

    Authentication may be added later than this, and what is added last would be outermost.
    """
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: wrap(build())

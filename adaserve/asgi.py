"""What a request asks for, by its ASGI scope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def route_path(scope: Mapping[str, Any]) -> str:
    """The path as routes are named, without the prefix of ``--fastapi-root-path``."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

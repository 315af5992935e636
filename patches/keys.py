"""What cannot be a key is answered with 401, like any wrong key.

Why: SGLang compares keys as texts, which Python does for ASCII alone. So whoever sent ``Bearer é`` to a server
with a key got 500, and the log a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.utils.auth.decide_request_auth", _ascii_only, HookType.AROUND)


def _ascii_only(original: Callable[..., Any], *, authorization_header: str | None, **more: Any) -> Any:
    if authorization_header is not None and not authorization_header.isascii():
        authorization_header = None
    return original(authorization_header=authorization_header, **more)

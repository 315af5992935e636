"""What is added to SGLang's HTTP app before it serves: the live page, refusals, limits and headers.

Why: SGLang has no place for more routes and middleware. It runs its app in its first process; several HTTP
processes import it by a name, which is that of ``adaserve.http_app``.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook, live_page, load_headers, routes, server_info


def register() -> None:
    hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", _before_run, HookType.BEFORE)


def _before_run(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    complete(app)


def complete(app: Any) -> None:
    """Adds everything, once."""
    if getattr(app.state, "adaserve", False):
        return
    app.state.adaserve = True
    for module in (live_page, routes, server_info, load_headers):  # the last one around all others
        module.mount(app)

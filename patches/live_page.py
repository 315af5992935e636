"""The live page ``/slo`` and ``/slo/snapshot.json`` on SGLang's HTTP server.

Why: SGLang has no place for more routes. They are added to its app before it runs; the page, which
holds no figures, is put outside everything, so that it loads with authentication switched on.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.slo.page import PageMiddleware, add_snapshot_route
from adaserve.slo.snapshot import build_snapshot


def register() -> None:
    hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", _before_run, HookType.BEFORE)


def _before_run(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    mount(app)


def mount(app: Any) -> None:
    """Adds page and snapshot to SGLang's app, once, before it serves."""
    if getattr(app.state, "adaserve_live", False):
        return
    app.state.adaserve_live = True
    add_snapshot_route(app, snapshot)
    build = app.build_middleware_stack
    # Authentication is added later than this, and whatever is added last would be outermost.
    app.build_middleware_stack = lambda: PageMiddleware(build())


async def snapshot() -> dict[str, Any]:
    """The state of all ranks as one JSON value."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    reports = [r["adaserve"] for r in await state.tokenizer_manager.get_internal_state() if "adaserve" in r]
    first = reports[0] if reports else {}
    return build_snapshot(
        [r["stats"] for r in reports],
        model=state.tokenizer_manager.served_model_name,
        policy=first.get("policy"),
        baseline_ms=first.get("baseline_ms"),
    ).to_json()

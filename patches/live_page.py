"""The live page ``/slo`` and ``/slo/snapshot.json`` on SGLang's HTTP server.

Why: SGLang has no place for more routes. They are added to its app before it runs; the page, which
holds no figures, is put outside everything, so that it loads with authentication switched on.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.slo import page
from adaserve.slo.snapshot import build_snapshot


def register() -> None:
    hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", _before_run, HookType.BEFORE)


def _before_run(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    mount(app)


def mount(app: Any) -> None:
    """Adds page and snapshot to SGLang's app, once, before it serves."""
    if not getattr(app.state, "adaserve_live", False):
        app.state.adaserve_live = True
        page.mount(app, snapshot)


async def snapshot() -> dict[str, Any]:
    """The state of all ranks as one JSON value."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    reports = [r["adaserve"] for r in await manager.get_internal_state() if "adaserve" in r]
    first = reports[0] if reports else {}
    states = [r["stats"] for r in reports]
    policy, baseline_ms = first.get("policy"), first.get("baseline_ms")
    return build_snapshot(states, manager.served_model_name, policy, baseline_ms).to_json()

"""Adds to SGLang's HTTP app before it serves: the live page, refusals, limits and headers.

Why: SGLang has no place for more routes and middleware. It runs its app in its first process; where there are
several HTTP processes, each imports an app by its name, and loads no plugins. Servers that run another
algorithm keep SGLang's.

A server whose port was taken while it started ends here. SGLang would wait two minutes for its own answer, or
take another server's at that port for it, warm that one up, and say that it is ready.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.host.ports import why_not_free
from adaserve.host.processes import end_children
from adaserve.patches import hook
from adaserve.patches.http import (
    admin_access,
    bodies,
    cached_status,
    live_page,
    load_headers,
    openai_errors,
    routes,
)

APP, APP_PATH = "adaserve.http_app:app", "SGLANG_HTTP_SERVER_APP_PATH"

PARTS = (bodies, live_page, admin_access, openai_errors, routes, cached_status, load_headers)
"""The last one is around all others."""


def register() -> None:
    hook("sglang.srt.entrypoints.http_server._setup_and_run_http_server", _before_run, HookType.BEFORE)


def _before_run(server_args: Any, *_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    if (why := why_not_free(server_args.host, server_args.port)) is not None:
        end_children(os.getpid())
        print(f"adaserve: {why}", file=sys.stderr, flush=True)
        os._exit(2)  # adaserve.commands.COULD_NOT, without what commands need
    os.environ.setdefault(APP_PATH, APP)
    complete(app)


def complete(app: Any) -> None:
    """Adds everything, once."""
    if getattr(app.state, "adaserve", False):
        return
    app.state.adaserve = True
    for module in PARTS:
        module.mount(app)

"""The live page ``/slo`` and ``/slo/snapshot.json`` on SGLang's HTTP server.

Why: the page, which holds no figures, is mounted outside the authentication, so that it loads when that is
switched on. SGLang leaves ordinary routes open if it has only an admin key; the snapshot then needs that key.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException, Request

from adaserve.patches import tokenizer_manager
from adaserve.patches.http import admin_access
from adaserve.slo import page
from adaserve.slo.snapshot import build_snapshot


def mount(app: Any) -> None:
    """Adds page and snapshot to SGLang's app."""
    page.mount(app, snapshot)


MIN_AGE_S = 1.0
"""A snapshot is kept this long, because the schedulers stand still while they report their state."""

PATIENCE_S = 5.0
"""How long a scheduler may take to report. A long prefill takes longer, and so does one that hangs."""


@dataclass
class _Latest:
    made_s: float = float("-inf")  # time.monotonic
    snapshot: dict[str, Any] = field(default_factory=dict)
    making: asyncio.Task[None] | None = None


_latest = _Latest()


async def snapshot(request: Request) -> dict[str, Any]:
    """The state of all ranks as one JSON value, at most a second old. Raises HTTPException."""
    from sglang.srt.runtime_context import get_serving

    keys = get_serving()
    if (
        keys.admin_api_key
        and not keys.api_key
        and not admin_access.has_admin_key(request, keys.admin_api_key)
    ):
        raise HTTPException(401, "this needs the server's admin key")
    if time.monotonic() - _latest.made_s >= MIN_AGE_S:
        await _renewed()
    return _latest.snapshot


async def _renewed() -> None:
    """Waits for a new snapshot, which all that ask share. Raises HTTPException when it takes too long.

    SGLang never gets over a question that was taken back, so the question is left standing.
    """
    if _latest.making is None or _latest.making.done():
        _latest.making = asyncio.create_task(_renew())
    done, _ = await asyncio.wait({_latest.making}, timeout=PATIENCE_S)
    if not done:
        why = f"the scheduler has not answered for {PATIENCE_S:.0f} s: a forward takes long, or it hangs"
        raise HTTPException(503, why)
    await _latest.making


async def _renew() -> None:
    _latest.snapshot = await _make()
    _latest.made_s = time.monotonic()


async def _make() -> dict[str, Any]:
    manager = tokenizer_manager()
    reports = [state["adaserve"] for state in await manager.get_internal_state()]
    states, first = [r["stats"] for r in reports], reports[0]
    notes = [note for r in reports for note in r["host"]["notes"]]
    return build_snapshot(
        states, manager.served_model_name, first["policy"], first["baseline_ms"], notes
    ).to_json()

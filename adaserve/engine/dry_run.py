"""What stands between candidates and their verification, gone through once more while a device drafts.

The host has nothing else to do by then, but the device will wait while it selects, builds and packs. What
these steps read and run has left the processor's caches since the last iteration, and without that they take
four times as long. So they are taken with the candidates of the last iteration, and what comes of it is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adaserve.engine.device import Device
from adaserve.engine.iteration import Iteration
from adaserve.engine.trees import verify
from adaserve.engine.trees.proposal import merge
from adaserve.scheduler.interface import IterationPlan, Policy


def dry_run(device: Device, policy: Policy, plan: IterationPlan, last: Iteration | None) -> None:
    """As far as the device's draft leaves time for it."""
    steps = [partial(policy.prepare, plan, None)] if last is None else _steps(device, policy, plan, last)
    for step in steps:
        if not device.is_busy():
            return
        step()


def _steps(
    device: Device, policy: Policy, plan: IterationPlan, last: Iteration
) -> Sequence[Callable[[], object]]:
    """Those of an iteration, in its order. A selection needs candidates of the plan's own requests. Where
    some have come or gone since ``last``, ``policy`` only prepares itself; all else takes the old ones."""
    is_same = plan.running.rids == last.plan.running.rids
    # A copy, of which nothing is worked out yet, as of candidates that have just been read.
    like = replace(last.proposal.trees) if is_same else None
    return (
        lambda: merge([*(draft.read() for draft in last.drafts), *last.offers], len(last.rows)),
        partial(policy.prepare, plan, like),
        partial(verify.build, last.rows, last.proposal, last.selection),
        partial(device.target.fill, last.verified.batch),
    )

"""What stands between candidates and their verification, gone through once more while a device drafts.

The host has nothing else to do by then, but the device will wait while it selects, builds and packs. What
these steps read and run has left the processor's caches since the last iteration, and without that they take
four times as long. So they are taken with the candidates of the last iteration, and what comes of it is
dropped.
"""

from __future__ import annotations

from functools import partial

from adaserve.engine.device import Device
from adaserve.engine.iteration import Iteration
from adaserve.engine.trees import verify
from adaserve.engine.trees.proposal import merge
from adaserve.scheduler.interface import IterationPlan, Policy


def dry_run(device: Device, policy: Policy, plan: IterationPlan, last: Iteration | None) -> None:
    """As far as the device's draft leaves time for it. Where other requests run than in ``last``, their
    candidates say nothing: then ``policy`` only prepares itself."""
    if not device.is_busy():
        return
    if last is None or plan.running.rids != last.plan.running.rids:
        policy.prepare(plan, None)
        return
    for step in (
        partial(policy.prepare, plan, last.proposal.trees),
        lambda: merge([draft.read() for draft in last.drafts], len(last.rows)),
        partial(verify.build, last.rows, last.proposal, last.selection),
        partial(device.target.fill, last.verified.batch),
    ):
        step()
        if not device.is_busy():
            return

"""A trial run of the host's steps between candidates and their verification, while a device drafts.

The host has nothing else to do then, but the device will wait later while it selects, builds and packs. The
code and data of these steps have left the processor's caches since the last iteration, which makes them four
times slower. So they are run with the candidates of the last iteration, and the result is dropped.
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
    """Runs as many of the steps as the device's draft leaves time for."""
    steps = [partial(policy.prepare, plan, None)] if last is None else _steps(device, policy, plan, last)
    for step in steps:
        if not device.is_busy():
            return
        step()


def _steps(
    device: Device, policy: Policy, plan: IterationPlan, last: Iteration
) -> Sequence[Callable[[], object]]:
    """The steps of an iteration, in order. A selection needs candidates of the plan's own requests. If some
    have come or gone since ``last``, ``policy`` only prepares itself; the other steps use the old
    candidates."""
    is_same = plan.running.rids == last.plan.running.rids
    # A copy, of which nothing is worked out yet, as of candidates that have just been read.
    like = replace(last.proposal.trees) if is_same else None
    return (
        lambda: merge([*(draft.read() for draft in last.draft.pending), *last.offers], len(last.rows)),
        partial(policy.prepare, plan, like),
        partial(verify.build, last.rows, last.proposal, last.selection),
        partial(device.target.fill, last.verified.batch),
    )

"""The target drafts for itself, with the first and recent tokens of its own KV cache (MagicDec, section 4).

No second model, no second cache and nothing to catch up with. Its steps write KV for the root and behind it,
computed from little. The verification of the same iteration writes that of the root and of every kept node
again, from everything, and what lies behind the committed tokens is never read: so the cache holds what plain
decoding leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adaserve.engine.parts import Device
from adaserve.engine.sources.beam import (
    drafted_rows,
    fitting_shape,
    for_rows,
    left_out,
    proposal,
    search_for,
)
from adaserve.engine.sources.source import Drafting, KeepDrafting
from adaserve.engine.state import DecodeRows
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.pair.acceptance import DraftSharpening
from adaserve.scheduler.interface import IterationPlan

_ALMOST_ZERO, _HOT = 0.02, 2.0
_TEMPERATURES = (0.0, _ALMOST_ZERO, _HOT)
SHARPENING = DraftSharpening(
    temperatures=_TEMPERATURES,
    taus=(0.5, _ALMOST_ZERO, _HOT),
    shared=(_TEMPERATURES, (0.5, _ALMOST_ZERO / 2, _HOT / 2), _TEMPERATURES),
)
"""The target's own way to draw: its temperature and, where that is known, its noise. Twice as sharp with the
noise, which leaves the order as it is: most draws agree. What that is worth is calibrated while serving."""


class SelfSource:
    """``TreeSource`` over the target's own forwards. ``max_nodes``: KV slots that a window has for them."""

    def __init__(self, device: Device, max_nodes: int) -> None:
        if device.target.first_tokens is not None:
            raise ValueError(
                "a target drafts for itself on CPUs only: on a GPU there are no graphs of its searches. Use "
                "--drafts model or --drafts suffix"
            )
        self._forward, self._max_nodes = device.target, max_nodes

    def prefilled(self, batch: Any, drafts: bool) -> None:
        """Nothing: what the target has read it knows."""

    def offer(self, rows: DecodeRows) -> Proposal | None:
        """Nothing without a forward."""
        return None

    def propose(self, plan: IterationPlan, rows: DecodeRows, keep: KeepDrafting | None) -> Drafting | None:
        """Up to plan.depth draft steps; None when no row may have a tree, or none is to be drafted for."""
        active = drafted_rows(plan, rows)
        shape = fitting_shape(plan, rows, active, self._max_nodes)
        if shape is None:
            return None
        first = TreeBatch.roots(
            rows.roots[active],
            rows.pool_rows[active],
            rows.seq_lens[active],
            shape.width,
            left_out(plan, rows.seq_lens, active),
        )
        search = search_for(SHARPENING, rows, active, shape)
        ready = self._forward.search(first, search, for_rows(keep, plan, active, len(rows)))
        return Drafting(lambda: proposal(shape, active, ready(), len(rows)))

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """Nothing: verification has written the KV."""

    def finished(self, pool_row: int) -> None:
        """Nothing is kept of a request."""

"""The target drafts for itself, with the first and recent tokens of its own KV cache (MagicDec, section 4).

There is no second model, no second cache and nothing to catch up on. Its steps write KV for the root and what
follows, computed from a part of the context. The verification of the same iteration writes the KV of the root
and of every kept node again, computed from all of it. KV beyond the committed tokens is never read. So the
cache holds what plain decoding leaves.
"""

from __future__ import annotations

from adaserve.engine.device import Drafter
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.trees.shape import ANY_DEPTH
from adaserve.sharpening import DraftSharpening

_ALMOST_ZERO, _HOT = 0.02, 2.0
_TEMPERATURES = (0.0, _ALMOST_ZERO, _HOT)
SHARPENING = DraftSharpening(
    temperatures=_TEMPERATURES,
    taus=(0.5, _ALMOST_ZERO, _HOT),
    shared=(_TEMPERATURES, (0.5, _ALMOST_ZERO / 2, _HOT / 2), _TEMPERATURES),
)
"""The target's own way to draw: its temperature and, where that is known, its noise. Twice as sharp with the
noise, which leaves the order as it is: most draws agree. What that is worth is calibrated while serving."""


class SelfDraftSource(StatelessSource):
    """The target's own searches as a source, ``--drafts self``."""

    def __init__(self, drafter: Drafter, max_nodes: int) -> None:
        super().__init__(drafter, SHARPENING, max_nodes, ANY_DEPTH)

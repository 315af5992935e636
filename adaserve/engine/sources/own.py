"""The target drafts for itself, with the first and recent tokens of its own KV cache (MagicDec, section 4).

No second model, no second cache and nothing to catch up with. Its steps write KV for the root and what
follows, computed from little. The verification of the same iteration writes that of the root and of every
kept node again, from everything, and what lies beyond the committed tokens is never read: so the cache holds
what plain decoding leaves.
"""

from __future__ import annotations

from adaserve.engine.device import Device
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


class SelfSource(StatelessSource):
    """The target's own forwards. ``max_nodes``: KV slots that a window has for them."""

    def __init__(self, device: Device, max_nodes: int) -> None:
        if device.target.first_tokens is not None:
            raise ValueError(
                "a target drafts for itself on CPUs only: on a GPU there are no graphs of its searches. Use "
                "--drafts model or --drafts suffix"
            )
        super().__init__(device.target, SHARPENING, max_nodes, ANY_DEPTH)

"""How a draft's probabilities have to be read to predict acceptance: a measured sharpening per temperature.

The verify step accepts a child with the target's probability at the request's temperature T. The draft's own
distribution at T is a poor estimate of it, most of all for greedy requests, where the target gives its best
token all the weight. Reading the draft's logits at tau(T) instead makes path probabilities right on average.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE_NAME = "acceptance.json"
# For drafts without a measurement: what the embedded pair's first versions showed, on the modest side.
_UNMEASURED = ((0.0, 0.5, 1.0), (0.5, 0.75, 1.0))


@dataclass(frozen=True)
class DraftSharpening:
    """Piecewise linear tau(T); constant outside the measured temperatures."""

    temperatures: tuple[float, ...]
    taus: tuple[float, ...]
    measured: bool = True

    def __post_init__(self) -> None:
        if list(self.temperatures) != sorted(set(self.temperatures)) or not self.temperatures:
            raise ValueError(f"temperatures must rise: {self.temperatures}")
        if len(self.taus) != len(self.temperatures) or min(self.taus) <= 0:
            raise ValueError(f"one positive tau per temperature is needed: {self.taus}")

    def tau(self, temperature: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What to divide the draft's logits by for requests of these sampling temperatures (0 is greedy)."""
        return np.interp(np.asarray(temperature, dtype=np.float64), self.temperatures, self.taus)


def load_sharpening(draft: Path) -> DraftSharpening:
    """The measured sharpening shipped with a draft, or a modest default for drafts without one."""
    path = draft / FILE_NAME
    if not path.exists():
        return DraftSharpening(*_UNMEASURED, measured=False)
    table = json.loads(path.read_text())["draft_temperature"]
    return DraftSharpening(tuple(table["request_temperature"]), tuple(table["tau"]))

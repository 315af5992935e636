"""How a draft's probabilities have to be read to predict acceptance: a measured sharpening per temperature.

The verify step accepts a child with the target's probability at the request's temperature T. The draft's own
distribution at T is a poor estimate of it, most of all for greedy requests, where the target gives its best
token all the weight. Reading the draft's logits at tau(T) instead makes path probabilities right on average.

Where draft and target share their noise g (adaserve/noise.py), the verify step accepts the best token of
``logits / T + g``. The draft guesses it from ``(its logits + noise(T) g) / shared_tau(T)``, both measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adaserve.errors import UnsupportedError

FILE_NAME = "acceptance.json"
LOWEST = 1e-6
"""Temperature of requests that sample: below it SGLang takes them for greedy."""
# For drafts without a measurement: what the embedded pair's first versions showed, on the modest side.
_UNMEASURED = ((0.0, 0.5, 1.0), (0.5, 0.75, 1.0))
_UNMEASURED_SHARED = ((0.0, 0.5, 1.0), (0.5, 0.55, 0.65), (0.0, 0.5, 0.95))


@dataclass(frozen=True)
class DraftSharpening:
    """Piecewise linear in T; constant outside the measured temperatures.

    ``shared``: temperatures, taus and weights of the noise where the target shares its noise.
    """

    temperatures: tuple[float, ...]
    taus: tuple[float, ...]
    shared: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]] = _UNMEASURED_SHARED

    def __post_init__(self) -> None:
        for temperatures, taus in ((self.temperatures, self.taus), self.shared[:2]):
            if list(temperatures) != sorted(set(temperatures)) or not temperatures:
                raise ValueError(f"temperatures must rise: {temperatures}")
            if len(taus) != len(temperatures) or min(taus) <= 0:
                raise ValueError(f"one positive tau per temperature is needed: {taus}")
        if len(self.shared[2]) != len(self.shared[0]) or min(self.shared[2]) < 0:
            raise ValueError(f"one weight of the noise per temperature is needed: {self.shared[2]}")

    def tau(self, temperature: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What to divide the draft's logits by for requests of these sampling temperatures (0 is greedy)."""
        return np.interp(np.asarray(temperature, dtype=np.float64), self.temperatures, self.taus)

    def without_shared_noise(
        self, temperature: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """`with_shared_noise` where the target's draws don't come from noise that is shared."""
        scale = 1.0 / self.tau(temperature)
        return scale, np.zeros_like(scale)

    def with_shared_noise(
        self, temperature: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Scale of the draft's logits, and of the noise shared with the target: 0 for greedy requests."""
        t = np.asarray(temperature, dtype=np.float64)
        temperatures, taus, noise = self.shared
        scale = 1.0 / np.interp(t, temperatures, taus)
        return scale, np.where(t > 0, np.interp(t, temperatures, noise) * scale, 0.0)

    def corrected(self, correction: Correction) -> DraftSharpening:
        """For a draft that has learned since this was measured."""
        temperatures, taus = correction.applied(self.temperatures, self.taus)
        shared_at, shared_taus = correction.applied(*self.shared[:2])
        noise = correction.noise * np.interp(shared_at, self.shared[0], self.shared[2])
        shared = (shared_at, shared_taus, tuple(noise.tolist()))
        return DraftSharpening(temperatures, taus, shared)

    def save(self, draft: Path) -> None:
        """Writes the tables beside a draft's weights, for ``load_sharpening``."""
        temperatures, taus, noise = self.shared
        report = {
            "draft_temperature": {"request_temperature": self.temperatures, "tau": self.taus},
            "shared_noise": {"request_temperature": temperatures, "tau": taus, "noise": noise},
        }
        (draft / FILE_NAME).write_text(json.dumps(report, indent=1) + "\n")


@dataclass(frozen=True)
class Correction:
    """Factors on what was measured for the first draft: of the noise, and of tau where requests sample and
    where they are greedy."""

    noise: float = 1.0
    tau: float = 1.0
    greedy_tau: float = 1.0

    def applied(
        self, temperatures: tuple[float, ...], taus: tuple[float, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Temperatures and corrected taus. Where the two factors differ, the lowest temperature of requests
        that sample is among them: a line from 0 on would mix theirs with that of greedy ones."""
        at = temperatures if self.tau == self.greedy_tau else tuple(sorted({0.0, LOWEST, *temperatures}))
        pairs = zip(at, np.interp(at, temperatures, taus).tolist(), strict=True)
        return at, tuple(tau * (self.tau if t > 0 else self.greedy_tau) for t, tau in pairs)


def load_sharpening(draft: Path) -> DraftSharpening:
    """The measured sharpening shipped with a draft, or a modest default for drafts without one. Raises
    UnsupportedError for a file that is damaged."""
    path = draft / FILE_NAME
    if not path.exists():
        return DraftSharpening(*_UNMEASURED)
    try:
        return sharpening_of(json.loads(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"{path} cannot be read ({error!r}): copy it once more, or delete it, and default values are used"
        ) from error


def sharpening_of(report: dict[str, Any]) -> DraftSharpening:
    """What a report of measurements says of it."""
    alone = report["draft_temperature"]
    shared = _UNMEASURED_SHARED
    if table := report.get("shared_noise"):
        shared = (tuple(table["request_temperature"]), tuple(table["tau"]), tuple(table["noise"]))
    return DraftSharpening(tuple(alone["request_temperature"]), tuple(alone["tau"]), shared)

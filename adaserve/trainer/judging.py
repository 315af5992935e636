"""Whether a candidate is better than the draft that is served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adaserve.sharpening import Correction
from adaserve.slo.events import DraftScores

SURE = 2.0
"""Standard errors by which a candidate must gain or lose. With one of them a sixth of the candidates that are
no better would serve, and each of the next ones would be compared with a draft that is a little worse.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A draft as it would be served."""

    state: Mapping[str, Tensor]  # rounded as the checkpoint is stored
    correction: Correction  # of how the first draft is read


@dataclass(frozen=True, slots=True)
class Judgement:
    """Three drafts on the same requests: expected accepted tokens of a chain of 4, [n] each."""

    draft: Snapshot  # the candidate
    candidate: Tensor
    present: Tensor
    first: Tensor
    classes: tuple[str, ...]  # of the n requests
    returns: bool = False  # the candidate is the first draft, which is to serve again

    @property
    def verdict(self) -> str:
        """Whether the candidate is "better" than the present draft, "worse", or it is "undecided"; "first"
        where the first draft is to serve again."""
        return "first" if self.returns else verdict(self.candidate - self.present)

    @property
    def wins(self) -> bool:
        """Whether the candidate is to serve."""
        return self.verdict in ("better", "first")

    def by_class(self) -> dict[str, DraftScores]:
        """Class -> how many requests, and the mean scores of the present and the first draft."""
        at = {name: torch.tensor([c == name for c in self.classes]) for name in sorted(set(self.classes))}
        return {
            name: DraftScores(int(of.sum()), float(self.present[of].mean()), float(self.first[of].mean()))
            for name, of in at.items()
        }


def verdict(gains: Tensor) -> str:
    """Of gains [n] on n requests."""
    from scipy.stats import norm, t  # which take a second to import

    mean, n = float(gains.mean()), len(gains)
    # As sure as ``SURE`` standard errors are with many requests: of a few, the spread is hardly known.
    bound = t.ppf(norm.cdf(SURE), n - 1) * float(gains.std()) / math.sqrt(n) if n > 1 else math.inf
    if not math.isfinite(mean) or mean < -bound:
        return "worse"
    return "better" if mean > bound else "undecided"

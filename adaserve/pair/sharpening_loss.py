"""How well a draft's probabilities say which of its tokens are accepted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WIDTH = 3
"""How many of the draft's likeliest tokens are looked at: those that trees are made of."""
_ALMOST = 1e-6


def top_k_log_loss(logits: Tensor, wanted: Tensor, taus: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The logarithmic loss, for each of the ``taus``, of what logits [n, vocab] divided by it say about each
    of their likeliest tokens: it is the target's (``wanted`` [n]), or it is not.

    A wanted token that the draft does not know counts, too: what it proposed there was wrong. A cross entropy
    would have to leave it out, and be content with a draft that is too sure of itself.
    """
    best, ids = logits.topk(min(WIDTH, logits.shape[1]))
    hit = ids == wanted[:, None]
    losses = []
    for tau in taus.tolist():
        said = (best / tau - (logits / tau).logsumexp(-1, keepdim=True)).exp().clamp(_ALMOST, 1 - _ALMOST)
        losses.append(-torch.where(hit, said, 1 - said).log().sum().item())
    return np.array(losses)

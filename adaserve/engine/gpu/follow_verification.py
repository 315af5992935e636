"""Lets a search that was queued behind a verification begin with the tokens that it accepted.

The host has given the search places for the longest case, as if all verified tokens were accepted. The tokens
that were really accepted are read here, on the device, before the search's graph runs. Every request's list
of keys is then shortened at its end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from adaserve.engine.device import Awaited


def begin_with(awaited: Awaited, rows: Tensor, there: Mapping[str, Tensor]) -> Tensor:
    """Writes the first step's last two tokens into the search's input, and moves all places of its requests
    to where they belong. Returns by how many keys each request is shorter, int64 [R].

    ``rows`` int64 [R]: which request of the verification each one is; -1 = padding."""
    if rows.is_cuda:
        from adaserve.engine.gpu.follow_kernel import begin_fused

        return begin_fused(awaited, rows, there)
    row = rows.clamp(min=0)
    length, emitted = awaited.length[row], awaited.emitted[row]
    short = torch.where(rows < 0, 0, awaited.most - length)
    before = torch.where(
        length > 1,
        emitted.gather(1, (length - 2).clamp(min=0)[:, None])[:, 0],
        awaited.tokens[awaited.root[row]],
    )
    there["tokens"][:, -2] = before
    there["tokens"][:, -1] = emitted.gather(1, (length - 1)[:, None])[:, 0]
    there["places"][:, -2:] -= short[:, None]
    there["base"].sub_(short)
    there["lists"][:, 1] -= short
    return short

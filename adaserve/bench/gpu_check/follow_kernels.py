"""The kernels behind a verification, which give the next draft what was accepted, against torch on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from adaserve.engine.device import Awaited
from adaserve.engine.gpu.attention_kernel import TILE, Cut, tiles_of
from adaserve.engine.gpu.attention_layout import LIST
from adaserve.engine.gpu.follow_kernel import begin_fused, shorten_fused
from adaserve.engine.gpu.follow_verification import begin_with

MOST, TOKENS, GROUP = 7, 3, 2
"""Tokens that the verification commits at most, of a request in a draft step, and heads of a group."""


def check_follow(requests: int, first: int, device: torch.device) -> dict[str, Any]:
    """Numbers that are wrong; all are exact. A draft for most of the ``requests``, in another order, whose
    first step has room for ``first`` tokens, and padding."""
    generator = torch.Generator().manual_seed(requests)
    searched, padded = requests - requests // 4, requests + 3
    length = torch.randint(1, MOST + 1, (requests,), generator=generator)
    emitted = torch.randint(1, 90, (requests, MOST + 1), generator=generator)[:, 1:]  # a view, as it may be
    root = torch.arange(requests) * MOST
    tokens = torch.randint(1, 90, (requests * MOST,), generator=generator)
    awaited = Awaited(MOST, length, emitted, tokens, root, np.zeros(0, np.int64))
    rows = torch.full((padded,), -1)
    rows[:searched] = torch.randperm(requests, generator=generator)[:searched]
    right = {
        name: torch.randint(50, 99, shape, generator=generator)
        for name, shape in (("tokens", (padded, first)), ("places", (padded, first)), ("base", (padded,)),
                            ("lists", (padded, LIST)))
    }  # fmt: skip
    got = {name: values.to(device) for name, values in right.items()}
    there = {name: getattr(awaited, name).to(device) for name in ("length", "emitted", "tokens", "root")}
    short = begin_with(awaited, rows, right)
    found = begin_fused(replace(awaited, **there), rows.to(device), got)
    wrong = int((short != found.cpu()).sum())
    wrong += sum(int((right[name] != got[name].cpu())[:searched].sum()) for name in right)

    kv_lens, cut = np.ones(padded, np.int64), Cut(4, 2 * padded + 1, 1, 1, 4)
    kv_lens[:searched] = 20 + np.arange(searched)
    of_kernel = [0, 1, 2, 4, 5]  # where keys start stays as it was planned
    planned, expected = (
        tiles_of(np.full(padded, TOKENS), lens, GROUP, cut) for lens in (kv_lens, kv_lens - short.numpy())
    )
    tiles = torch.from_numpy(planned).to(device)
    shorten_fused(tiles, found, TOKENS)
    wrong += int((tiles.cpu().numpy().reshape(-1, TILE) != expected)[:, of_kernel].sum())
    return {"requests": requests, "first": first, "wrong": wrong, "right": not wrong}

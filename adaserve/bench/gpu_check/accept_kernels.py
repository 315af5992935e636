"""The kernels that accept tokens and say where their KV belongs, against what a host does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.gpu.accept_kernel import accept_fused, moves_fused
from adaserve.engine.trees import verify

POOLS, ROOM = 3, 60
"""Pools that have the tokens' KV, and places of every request's list of slots."""


def check_accept(requests: int, most: int, deepest: int, device: torch.device) -> dict[str, Any]:
    """Numbers that are wrong; all are exact. Trees of up to ``most`` candidates, some of none, whose draws
    follow them most of the time."""
    generator = np.random.default_rng(requests + most)
    sizes = np.asarray(generator.integers(0, most + 1, (requests,)))
    sizes[0] = most
    arrays = _trees(sizes, deepest, generator)
    tree, stride = arrays["tree"], deepest + 2  # trees may be less deep than they could be
    draws = np.asarray(generator.integers(0, 9, (tree.shape[1],)))
    for i in range(len(draws)):
        below = np.flatnonzero((tree[4] == i) & (tree[1] > 0))
        if len(below) and generator.random() < 0.8:
            draws[i] = tree[0, generator.choice(below)]
    table = torch.from_numpy(generator.permutation(requests * ROOM).reshape(requests, ROOM).astype(np.int32))
    there = {name: torch.from_numpy(values) for name, values in arrays.items()}
    drawn = torch.from_numpy(draws)
    right = verify.accept(there, drawn, requests, deepest, stride)
    slots = verify.moves(there, right, table, requests, deepest)
    away = {name: _somewhere(values, device) for name, values in there.items()}
    got = accept_fused(away, _somewhere(drawn, device), requests, deepest, stride)
    found = moves_fused(away, got, table.to(device), requests, deepest)
    pairs = [(getattr(right, f.name), getattr(got, f.name)) for f in fields(right)]
    pairs += zip(slots, found, strict=True)
    wrong = sum(int((a != b.cpu()).sum()) + abs(a.numel() - b.numel()) for a, b in pairs)
    return {"requests": requests, "most": most, "deepest": deepest, "accepted": int(right.count.sum()),
            "wrong": wrong, "right": not wrong}  # fmt: skip


def _trees(sizes: np.ndarray, deepest: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """``VerifyBatch.arrays`` of random trees with as many candidates; the first one has a path to the end."""
    total, requests = len(sizes) + int(sizes.sum()), len(sizes)
    root = np.cumsum(sizes + 1) - (sizes + 1)
    row = np.arange(requests).repeat(sizes + 1)
    tree = np.zeros((4 + deepest, total), np.int64)
    tree[0], tree[2], tree[3:] = np.arange(total), row, np.arange(total)  # no two children are the same
    for i in range(total):
        begin = root[row[i]]
        if i > begin:
            may = begin + np.flatnonzero(tree[1, begin:i] < deepest)
            above = i - 1 if i <= deepest else generator.choice(may)
            tree[1, i], tree[4:, i] = tree[1, above] + 1, tree[3:-1, above]
    places = generator.integers(0, ROOM, (1 + POOLS, total))
    return {"tree": tree, "row": row, "root": root, "places": places}


def _somewhere(values: Tensor, device: torch.device) -> Tensor:
    """A copy that is not aligned, as a part of an upload may be."""
    return torch.cat([values.flatten()[:1], values.flatten()]).to(device)[1:].view(values.shape)

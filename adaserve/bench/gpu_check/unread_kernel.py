"""The kernel that writes unread candidates into a verification, against torch on a CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from adaserve.engine.gpu.unread_candidates import write_nodes
from adaserve.engine.gpu.unread_kernel import write_fused
from adaserve.engine.trees.batch import UnreadNodes
from adaserve.engine.trees.shape import tree_shape

ROOM, LAST_TOKEN = 5, 70
"""More tokens, and more columns, than the verification has; tokens of the draft may be larger."""


def check_unread(requests: int, depth: int, width: int, device: torch.device) -> dict[str, Any]:
    """Numbers that are wrong; all are exact. Every fourth request has no candidates, and the others stand in
    another order than in the search."""
    generator = torch.Generator().manual_seed(requests)
    shape, searched = tree_shape(depth, width, None), requests - requests // 4
    of = np.full(requests, -1)
    of[np.arange(requests) % 4 != 3] = torch.randperm(searched, generator=generator).numpy()
    sizes = np.where(of < 0, 1, 1 + shape.nodes)
    root, row = sizes.cumsum() - sizes, np.arange(requests).repeat(sizes)
    total, padded = len(row), searched + 2
    found = torch.randint(0, 90, (3, padded, shape.nodes), generator=generator)
    path = torch.where(torch.rand(padded, shape.nodes, generator=generator) < 0.2, -math.inf, -1.0)
    path[0, ::2] = math.nan
    found[2] = path.double().view(torch.int64)
    found[1] = -1
    for before, now, end in zip(shape.start, shape.start[1:], shape.start[2:], strict=False):
        found[1, :, now:end] = torch.randint(before, now, (padded, end - now), generator=generator)
    tree = torch.randint(0, 70, (4 + depth, total), generator=generator)
    tree[3:, root] = torch.from_numpy(root)
    tensors = {"tree": tree, "of": of, "row": row, "root": root, "columns": shape.columns}
    right = {name: torch.as_tensor(values) for name, values in tensors.items()}
    got = {name: values.to(device, copy=True) for name, values in right.items()}
    outputs = []
    for there, write in ((right, write_nodes), (got, write_fused)):
        place = there["tree"].device
        tokens = torch.full((total + ROOM,), 7, device=place)
        seen = torch.zeros(total + ROOM, shape.width + ROOM, dtype=torch.bool, device=place)
        seen[:total, ROOM] = True
        tokens[:total] = there["tree"][0]
        write(UnreadNodes(found.to(place), there), tokens, seen, LAST_TOKEN)
        outputs.append([tokens.cpu(), seen.cpu(), there["tree"].cpu()])
    wrong = sum(int((a != b).sum()) for a, b in zip(*outputs, strict=True))
    return {"requests": requests, "depth": depth, "width": width, "wrong": wrong, "right": not wrong}

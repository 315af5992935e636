"""Candidates that are verified before the host has read them: the device itself writes their tokens.

The host lays out the verification as if every candidate were a child of its root, because tokens and parents
are known only when the search ends. They are filled in here, after the search and before the verification's
graph runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adaserve.engine.trees.batch import UnreadNodes
from adaserve.engine.trees.verify import NOTHING


def write_nodes(unread: UnreadNodes, tokens: Tensor, seen: Tensor, last_token: int) -> None:
    """Writes the candidates' tokens and the paths to their roots into ``VerifyBatch.tree``, and the input of
    the forward: ``tokens`` int64 [room], at most ``last_token``, and ``seen`` bool [room, columns]. Before,
    every candidate sees its root and itself there.

    A request's nodes are the first ones of its row. If logits are NaN, siblings have the same token and no
    probability. No selection keeps these, and no draw may equal one of them, so they are ``NOTHING``."""
    if tokens.is_cuda:
        from adaserve.engine.gpu.unread_kernel import write_fused

        return write_fused(unread, tokens, seen, last_token)
    found, t = unread.found, unread.tensors
    tree, row, root, columns = t["tree"], t["row"], t["root"], t["columns"]
    width = 1 + len(columns)
    begin, at = root[row], torch.arange(len(row))
    node = at - begin - 1
    search_row = t["of"][row]
    is_node = node >= 0
    of_node = node.clamp(min=0)
    is_possible = found.view(torch.float64)[2, search_row, of_node] > -math.inf  # not so if it is no number
    said = torch.where(is_possible, found[0, search_row, of_node], NOTHING)
    tree[0] = torch.where(is_node, said, tree[0])
    tokens[: len(row)] = tree[0].clamp(0, last_token)
    above = torch.where(is_node, found[1, search_row, of_node], -1)
    window = seen[: len(row), seen.shape[1] - width :]
    for level in range(4, len(tree)):
        tree[level] = torch.where(above < 0, begin, begin + 1 + above)
        window[at, torch.where(above < 0, 0, columns[above.clamp(min=0)])] = torch.ones_like(is_node)
        above = torch.where(above < 0, -1, found[1, search_row, above.clamp(min=0)])

"""``unread_candidates.write_nodes`` as one Triton kernel: a program has a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaserve.engine.trees.batch import UnreadNodes
from adaserve.engine.trees.verify import NOTHING


def write_fused(unread: UnreadNodes, tokens: Tensor, seen: Tensor, last_token: int) -> None:
    """All of it is contiguous."""
    found, t = unread.found, unread.tensors
    tree, columns = t["tree"], t["columns"]
    levels, total = tree.shape
    _, rows, nodes = found.shape
    _write[(total,)](
        found, found.view(torch.float64), t["of"], t["row"], t["root"], columns, tree, tokens,
        seen.view(torch.uint8), rows * nodes, nodes, total, levels, seen.shape[1], last_token, NOTHING,
    )  # fmt: skip


# Compiled once: uploads start anywhere.
@triton.jit(
    do_not_specialize=["plane", "nodes", "total", "levels", "width", "last_token"],
    do_not_specialize_on_alignment=[
        "found", "paths", "of", "row", "root", "columns", "tree", "tokens", "seen",
    ],
)  # fmt: skip
def _write(  # type: ignore[no-untyped-def]
    found, paths, of, row, root, columns, tree, tokens, seen, plane, nodes, total, levels, width, last_token,
    nothing: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(row + token)
    begin = tl.load(root + request)
    node = token - begin - 1
    if node >= 0:
        said = found + tl.load(of + request) * nodes
        parents = said + plane
        path = tl.load(paths + 2 * plane + tl.load(of + request) * nodes + node)
        is_possible = path > float("-inf")  # not so if it is not a number
        is_token = tl.load(said + node)
        tl.store(tree + token, tl.where(is_possible, is_token, nothing))
        tl.store(tokens + token, tl.where(is_possible, tl.minimum(is_token, last_token), 0))
        window = seen + (token + 1) * width - nodes - 1  # its columns are the root's and the nodes'
        above = tl.load(parents + node)
        for level in range(4, levels):
            inside = above >= 0
            tl.store(tree + level * total + token, tl.where(inside, begin + 1 + above, begin))
            column = tl.load(columns + above, mask=inside, other=0)
            tl.store(window + column, 1)
            above = tl.load(parents + above, mask=inside, other=-1)

"""How FlashInfer's planner cuts queries into tiles, and what that takes (``scheduler.cuh``, ``PrefillPlan``).

A tile holds 16, 64 or 128 queries of one request, each counted once for every head that shares a key head.
With CUDA graphs the planner sizes tiles for the longest request that there could be: one that has all tokens,
but for one of each other request. So 64 requests of three tokens are given tiles of 128 for twelve queries,
which multiply, mask and exponentiate ten times as much as they need. Requests of no tokens get no tile, and
leave less to the longest one: with enough of them, tiles are as large as the requests ask for.
"""

from __future__ import annotations

from adaserve.engine.gpu.attention_shape import AttentionShape

SMALL_TILES, LARGEST_TILE = (16, 64), 128

WORKSPACE_BYTES = 256 << 20
"""Of FlashInfer, at least: see ``workspace_bytes``."""


def workspace_bytes(heads: AttentionShape, rows: int, tokens: int) -> int:
    """FlashInfer's floats for at most ``rows`` requests, padding included, with ``tokens`` in all.

    A bound on what its planner asks for where CUDA graphs are on. It matters for models with many key heads:
    302 MB for 32 of 128 at 128 requests."""
    return max(WORKSPACE_BYTES, _partial_bytes(heads, rows, tokens, LARGEST_TILE))


def _partial_bytes(heads: AttentionShape, rows: int, tokens: int, tile: int) -> int:
    """One partial output and its scale for every query of ``tokens * group / tile + rows`` tiles, whatever
    the contexts; and a tile more for what is rounded."""
    group = heads.q_heads // heads.kv_heads
    return 4 * (tokens * group + tile * (rows + 1)) * heads.kv_heads * (heads.head_dim + 1)


def planned_rows(heads: AttentionShape, rows: int, tokens: int, longest: int, room: int) -> int:
    """Requests to plan for ``rows`` requests with ``tokens`` in all, and ``longest`` in one of them: more
    than ``rows`` where that makes tiles smaller and ``room`` bytes of workspace are enough."""
    group = heads.q_heads // heads.kv_heads
    for tile in SMALL_TILES:
        if longest * group <= tile:
            enough = max(rows, tokens + 1 - tile // group)
            return enough if _partial_bytes(heads, enough, tokens, tile) <= room else rows
    return rows

"""``verify.accept_paths`` and ``verify.moves`` as one Triton kernel each.

One program has a request, for moves one for each pool. It goes through the request's tokens in blocks. An
accepted path has one token of each depth, since siblings differ, so what is found of one is a sum over all
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaserve.engine.trees.verify import SCRATCH_SLOT, Acceptance

BLOCK = 32
"""Tokens of a request that are looked at together."""

MIN_PLACES = 16
"""So that trees of up to 15 levels share one compiled kernel."""


def accept_fused(t: Mapping[str, Tensor], draws: Tensor, n: int, deepest: int, stride: int) -> Acceptance:
    """``t`` and ``draws`` are contiguous."""
    device, total = draws.device, len(draws)
    accepted = torch.empty(total, dtype=torch.bool, device=device)
    room = n + n % 2  # SGLang's kernels may be given these, and want them at multiples of 16 bytes
    numbers = torch.empty(3, room, dtype=torch.int64, device=device)
    emitted = torch.empty(n, stride, dtype=torch.int64, device=device)
    _accept[(n,)](
        t["tree"], t["root"], draws, accepted.view(torch.uint8), numbers, emitted, total, n, room, deepest,
        stride, BLOCK, _places(stride),
    )  # fmt: skip
    count, length, bonus = numbers[:, :n].unbind()
    return Acceptance(accepted, count, length, bonus, emitted)


def moves_fused(
    t: Mapping[str, Tensor], acceptance: Acceptance, req_to_token: Tensor, n: int, deepest: int
) -> tuple[Tensor, Tensor]:
    pools, total = t["places"].shape
    slots = torch.empty(pools, n, deepest, dtype=torch.int64, device=req_to_token.device)
    _moves[(n, pools)](
        t["tree"], t["root"], t["places"], acceptance.accepted.view(torch.uint8), req_to_token, slots, total,
        n, deepest, req_to_token.stride(0), SCRATCH_SLOT, BLOCK, _places(deepest),
    )  # fmt: skip
    return slots[0], slots[1:]


def _places(most: int) -> int:
    return max(MIN_PLACES, triton.next_power_of_2(most))


# Compiled once: uploads start anywhere.
@triton.jit(
    do_not_specialize=["total", "n", "room", "deepest", "stride"],
    do_not_specialize_on_alignment=["tree", "root", "draws", "accepted", "numbers", "emitted"],
)
def _accept(  # type: ignore[no-untyped-def]
    tree, root, draws, accepted, numbers, emitted, total, n, room, deepest, stride, block: tl.constexpr,
    places: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    begin, count = _tokens_of(root, request, total, n)
    place = tl.arange(0, places)
    answer, taken = tl.zeros((places,), tl.int64), tl.zeros((places,), tl.int32)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        inside, token = at < count, begin + at
        right = inside
        for level in range(3, 3 + deepest):
            node = tl.load(tree + level * total + token, mask=inside, other=0)
            above = tl.load(tree + 4 * total + node, mask=inside, other=0)
            said = tl.load(draws + above, mask=inside, other=0)
            right = right & ((tl.load(tree + node, mask=inside, other=0) == said) | (node == begin))
        depth = tl.load(tree + total + token, mask=inside, other=0)
        draw = tl.load(draws + token, mask=inside, other=0)
        tl.store(accepted + token, right.to(tl.uint8), mask=inside)
        here = right[None, :] & (depth[None, :] == place[:, None])
        answer += tl.sum(here.to(tl.int64) * draw[None, :], axis=1)
        taken += tl.sum(here.to(tl.int32), axis=1)
    length = tl.sum(taken, axis=0)
    bonus = tl.sum((place == length - 1).to(tl.int64) * answer, axis=0)
    tl.store(numbers + request, (length - 1).to(tl.int64))
    tl.store(numbers + room + request, length.to(tl.int64))
    tl.store(numbers + 2 * room + request, bonus)
    tl.store(emitted + request * stride + place, answer, mask=place < stride)


@triton.jit(
    do_not_specialize=["total", "n", "deepest", "t_row", "scratch"],
    do_not_specialize_on_alignment=["tree", "root", "places_of", "accepted", "slots"],
)
def _moves(  # type: ignore[no-untyped-def]
    tree, root, places_of, accepted, table, slots, total, n, deepest, t_row, scratch, block: tl.constexpr,
    places: tl.constexpr,
):  # fmt: skip
    request, pool = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, count = _tokens_of(root, request, total, n)
    row = tl.load(tree + 2 * total + begin)
    place = tl.arange(0, places)
    found, taken = tl.zeros((places,), tl.int64), tl.zeros((places,), tl.int32)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        inside, token = at < count, begin + at
        on_path = inside & (tl.load(accepted + token, mask=inside, other=0) != 0)
        depth = tl.load(tree + total + token, mask=on_path, other=0)
        where = tl.load(places_of + pool * total + token, mask=on_path, other=0)
        slot = tl.load(table + row * t_row + where, mask=on_path, other=0).to(tl.int64)
        here = on_path[None, :] & (depth[None, :] == place[:, None] + 1)
        found += tl.sum(here.to(tl.int64) * slot[None, :], axis=1)
        taken += tl.sum(here.to(tl.int32), axis=1)
    to = slots + (pool * n + request) * deepest + place
    tl.store(to, tl.where(taken > 0, found, scratch), mask=place < deepest)


@triton.jit
def _tokens_of(root, request, total, n):  # type: ignore[no-untyped-def]
    """The request's first token, and how many it has."""
    begin = tl.load(root + request)
    is_last = (request + 1 == n).to(tl.int64)
    end = tl.load(root + request + 1, mask=request + 1 < n, other=0) + is_last * total
    return begin, (end - begin).to(tl.int32)

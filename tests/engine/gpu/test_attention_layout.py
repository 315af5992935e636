"""The flat arrays that FlashInfer gets: mask bits in its layout, slots, padding."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel
from adaserve.engine.gpu.attention_layout import Extent, list_slots, seen_by, slot_lists, unpack
from adaserve.engine.trees import attention
from adaserve.engine.trees.batch import ContextGap, TreeBatch
from adaserve.engine.trees.verify import SCRATCH_SLOT
from tests.engine.gpu.factories import CPU


def random_case(seed: int) -> tuple[Extent, np.ndarray, list[np.ndarray]]:
    """A forward's geometry, what its tokens see of their windows, and the masks that this means."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    q_lens, prefix = rng.integers(0, 5, n), rng.integers(0, 20, n)
    q_lens[0] += 1
    width = int(rng.integers(1, 7))
    seen = rng.random((int(q_lens.sum()), width)) < 0.5
    masks, token = [], 0
    for r in range(n):
        mask = np.zeros((q_lens[r], prefix[r] + width), np.bool_)
        mask[:, : prefix[r]] = True
        mask[:, prefix[r] :] = seen[token : token + q_lens[r]]
        token += q_lens[r]
        masks.append(mask)
    return Extent(q_lens, prefix + width), seen, masks


def hiding(buffers: AttentionBuffers, extent: Extent, seen: np.ndarray) -> AbstractContextManager[None]:
    return buffers.hiding(torch.from_numpy(extent.window_ends)[None], torch.from_numpy(seen)[None])


@pytest.mark.parametrize("seed", range(40))
def test_packed_as_flashinfer_reads_it(seed: int) -> None:
    """FlashInfer: byte ``indptr[r] + (q * kv + k) // 8``, bit ``(q * kv + k) % 8`` of request r."""
    extent, seen, masks = random_case(seed)
    buffers = AttentionBuffers.allocate(8, 4096, CPU)
    ends = np.cumsum([0, *((m.size + 7) // 8 for m in masks)])
    assert extent.byte_starts.tolist() == ends.tolist()
    for visible in (~seen, seen):
        with hiding(buffers, extent, visible):
            packed = buffers.mask.clone()
        assert buffers.mask.eq(255).all(), "what one forward hides must not matter to the next"
    assert packed[ends[-1] :].eq(255).all()
    for r, mask in enumerate(masks):
        piece = packed[ends[r] : ends[r + 1]].numpy()
        bits = np.unpackbits(piece, bitorder="little")[: mask.size].reshape(mask.shape)
        assert np.array_equal(bits, mask)
        assert np.array_equal(unpack(packed, int(ends[r]), *mask.shape).numpy(), mask)


def test_an_error_leaves_nothing_hidden() -> None:
    extent, seen, _ = random_case(3)
    buffers = AttentionBuffers.allocate(8, 4096, CPU)
    with pytest.raises(MemoryError), hiding(buffers, extent, seen):
        assert not buffers.mask.eq(255).all()
        raise MemoryError
    assert buffers.mask.eq(255).all()


def test_causal_batches_of_unequal_requests() -> None:
    """Also where a request has fewer keys than the window is wide: those columns belong to nobody."""
    q_lens, starts = np.array([3, 1, 2]), np.array([2, 3, 0])
    batch = TreeBatch.causal(np.arange(6), np.arange(3), starts, q_lens)
    assert batch.positions.tolist() == [2, 3, 4, 3, 0, 1]
    extent, buffers = Extent(q_lens, batch.kv_lens), AttentionBuffers.allocate(8, 16, CPU)
    with hiding(buffers, extent, seen_by(batch)):
        mask = buffers.mask.clone()
    for r, (q, kv) in enumerate(zip(q_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        right = torch.ones(q, kv).tril(kv - q).bool()
        assert torch.equal(unpack(mask, int(extent.byte_starts[r]), q, kv), right)


def test_gathered_slots() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    slots = gathered(table, np.array([2, 0, 3]), np.array([3, 0, 2]))
    assert slots == [20, 21, 22, 30, 31]


def gathered(
    table: torch.Tensor, rows: np.ndarray, kv_lens: np.ndarray, gap: ContextGap | None = None
) -> list[int]:
    extent = Extent(np.zeros(len(rows) + 2, np.int64), np.append(kv_lens, [1, 1]))
    lists, out = slot_lists(extent, rows, gap), torch.full((int(kv_lens.sum()) + 3,), 7).int()
    list_slots(table, torch.from_numpy(lists), out)
    *slots, one, two, beyond = out.tolist()
    assert (one, two, beyond) == (SCRATCH_SLOT, SCRATCH_SLOT, 7), "padding's"
    return slots


@pytest.mark.parametrize("seed", range(20))
def test_gathered_slots_with_a_gap(seed: int) -> None:
    """By the host's code and the device's, against lists that are cut by hand."""
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(rng.permutation(200).reshape(5, 40).astype(np.int32))
    rows, places, start = rng.permutation(5)[:3], rng.integers(1, 40, 3), int(rng.integers(0, 6))
    length = np.maximum(0, places - start - rng.integers(0, 30, 3))
    right = [
        slot
        for row, end, left_out in zip(rows, places, length, strict=True)
        for place, slot in enumerate(table[row, :end].tolist())
        if not start <= place < start + left_out
    ]
    kv_lens = places - length
    by_device = gathered(table, rows, kv_lens, ContextGap(start, length))
    by_host = attention.gather_slots(table, rows, kv_lens, ContextGap(start, length))
    assert by_device == by_host.tolist() == right


@pytest.mark.parametrize("seed", range(10))
def test_sdpa_over_flat_arrays_is_masked_attention(seed: int) -> None:
    """The kernel against attention written out per request, on slots in a shuffled pool."""
    extent, seen, masks = random_case(seed)
    kv_lens, q_lens = extent.kv_lens, extent.q_lens
    generator = torch.Generator().manual_seed(seed)
    pool = int(kv_lens.sum()) + 20
    slots = torch.randperm(pool, generator=generator)[: int(kv_lens.sum())].int()
    keys, values = (torch.randn(pool, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(int(q_lens.sum()), 4, 8, generator=generator)
    buffers = AttentionBuffers.allocate(256, 512, CPU)
    buffers.kv_indices[: len(slots)] = slots
    kernel = SdpaKernel(buffers)
    kernel.plan(extent)
    with hiding(buffers, extent, seen):
        got = kernel.run(q, keys, values, attention.Scores(0.3)).view_as(q)
    token = first = 0
    for r, mask in enumerate(masks):
        mine = slots[first : first + kv_lens[r]].long()
        for i in range(q_lens[r]):
            see = torch.from_numpy(mask[i])
            for head in range(4):
                if not see.any():
                    assert not got[token].any()
                    continue
                k, v = keys[mine, head // 2][see], values[mine, head // 2][see]
                right = torch.softmax(0.3 * k @ q[token, head], 0) @ v
                torch.testing.assert_close(got[token, head], right, rtol=1e-4, atol=1e-5)
            token += 1
        first += int(kv_lens[r])


def test_too_much_is_refused_with_the_remedy() -> None:
    buffers = AttentionBuffers.allocate(40, 4, CPU)
    buffers.require(Extent(np.array([1]), np.array([32])))
    with pytest.raises(RuntimeError, match="max-running-requests"):
        buffers.require(Extent(np.array([0]), np.array([41])))
    with pytest.raises(RuntimeError, match="mask of 5 bytes"):
        buffers.require(Extent(np.array([1]), np.array([33])))

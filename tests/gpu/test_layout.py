"""The flat arrays that FlashInfer gets: mask bits in its layout, slots, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.cuda.attention import AttentionBuffers, Extent, SdpaKernel
from adaserve.cuda.layout import MaskLayout, Ragged, gather_slots, unpack
from tests.gpu.factories import CPU


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """q_lens, kv_lens, limits per token and the masks that they and random windows mean."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    q_lens, prefix = rng.integers(0, 5, n), rng.integers(0, 20, n)
    q_lens[0] += 1
    width = int(rng.integers(1, 7))
    visible = rng.random((int(q_lens.sum()), width)) < 0.5
    masks, token = [], 0
    for r in range(n):
        mask = np.zeros((q_lens[r], prefix[r] + width), np.bool_)
        mask[:, : prefix[r]] = True
        mask[:, prefix[r] :] = visible[token : token + q_lens[r]]
        token += q_lens[r]
        masks.append(mask)
    return q_lens, prefix, visible, masks


@pytest.mark.parametrize("seed", range(40))
def test_packed_as_flashinfer_reads_it(seed: int) -> None:
    """FlashInfer: byte ``indptr[r] + (q * kv + k) // 8``, bit ``(q * kv + k) % 8`` of request r."""
    q_lens, prefix, visible, masks = random_case(seed)
    layout = MaskLayout(q_lens, prefix + visible.shape[1], CPU)
    limit = torch.from_numpy(np.repeat(prefix, q_lens))
    packed = layout.pack(limit, limit, torch.from_numpy(visible))
    pieces = [np.packbits(m.flatten(), bitorder="little") for m in masks]
    assert packed.tolist() == np.concatenate(pieces).tolist()
    assert layout.byte_starts.tolist() == np.cumsum([0, *map(len, pieces)]).tolist()
    assert Extent(q_lens, prefix + visible.shape[1]).byte_starts.tolist() == layout.byte_starts.tolist()
    for r, mask in enumerate(masks):
        assert np.array_equal(unpack(packed, int(layout.byte_starts[r]), *mask.shape).numpy(), mask)


def test_causal_limits() -> None:
    layout = MaskLayout(np.array([3]), np.array([5]), CPU)
    at = torch.tensor([2, 3, 4])
    packed = layout.pack(at + 1, torch.zeros_like(at), torch.zeros(3, 1, dtype=torch.bool))
    assert torch.equal(unpack(packed, 0, 3, 5), torch.ones(3, 5).tril(2).bool())


def test_gathered_slots() -> None:
    table = torch.arange(40).view(4, 10)
    slots = gather_slots(table, torch.tensor([2, 0, 3]), np.array([3, 0, 2]))
    assert slots.tolist() == [20, 21, 22, 30, 31] and slots.dtype == torch.int32


def test_ragged() -> None:
    pieces = Ragged(np.array([2, 0, 3]), CPU)
    assert pieces.row.tolist() == [0, 0, 2, 2, 2] and pieces.column.tolist() == [0, 1, 0, 1, 2]
    assert pieces.total == 5


@pytest.mark.parametrize("seed", range(10))
def test_sdpa_over_flat_arrays_is_masked_attention(seed: int) -> None:
    """The kernel against attention written out per request, on slots in a shuffled pool."""
    q_lens, prefix, visible, masks = random_case(seed)
    kv_lens = prefix + visible.shape[1]
    generator = torch.Generator().manual_seed(seed)
    pool = int(kv_lens.sum()) + 20
    slots = torch.randperm(pool, generator=generator)[: int(kv_lens.sum())].int()
    keys, values = (torch.randn(pool, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(int(q_lens.sum()), 4, 8, generator=generator)
    buffers = AttentionBuffers.allocate(256, 512, CPU)
    buffers.set_slots(slots, 3)
    limit = torch.from_numpy(np.repeat(prefix, q_lens))
    buffers.set_mask(MaskLayout(q_lens, kv_lens, CPU).pack(limit, limit, torch.from_numpy(visible)))
    kernel = SdpaKernel(buffers)
    kernel.plan(Extent(q_lens, kv_lens))
    got = kernel.run(q, keys, values, 0.3).view_as(q)
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
    buffers = AttentionBuffers.allocate(4, 2, CPU)
    with pytest.raises(RuntimeError, match="max-running-requests"):
        buffers.set_slots(torch.zeros(4, dtype=torch.int32), 1)
    with pytest.raises(RuntimeError, match="mask of 3 bytes"):
        buffers.set_mask(torch.zeros(3, dtype=torch.uint8))

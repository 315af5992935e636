"""The flat arrays that FlashInfer gets: mask bits in its layout, slots, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.device.attention import AttentionBuffers, Extent, SdpaKernel
from adaserve.engine.device.layout import MaskLayout, Ragged, gather_slots, unpack
from tests.engine.device.factories import CPU


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
    kv_lens = prefix + visible.shape[1]
    start = torch.from_numpy(np.repeat(prefix, q_lens))
    layout = MaskLayout(q_lens, kv_lens, start, visible.shape[1])
    packed = torch.full((4096,), 77, dtype=torch.uint8)
    for _ in range(2):  # what was there before must not matter
        layout.write(packed, torch.from_numpy(visible))
    ends = np.cumsum([0, *((m.size + 7) // 8 for m in masks)])
    assert layout.bytes == ends[-1] and packed[layout.bytes :].eq(77).all()
    assert Extent(q_lens, kv_lens).byte_starts.tolist() == ends.tolist()
    for r, mask in enumerate(masks):
        piece = packed[ends[r] : ends[r + 1]].numpy()
        bits = np.unpackbits(piece, bitorder="little")[: mask.size].reshape(mask.shape)
        assert np.array_equal(bits, mask)
        assert np.array_equal(unpack(packed, int(ends[r]), *mask.shape).numpy(), mask)


def test_windows_end_with_their_request() -> None:
    """Causal masks of unequal requests: columns beyond a request's keys belong to nobody."""
    q_lens, kv_lens = np.array([3, 1]), np.array([5, 4])
    start = torch.tensor([2, 2, 2, 3])
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    packed = torch.zeros(16, dtype=torch.uint8)
    MaskLayout(q_lens, kv_lens, start, 3).write(packed, visible)
    assert torch.equal(unpack(packed, 0, 3, 5), torch.ones(3, 5).tril(2).bool())
    assert unpack(packed, 2, 1, 4).all()


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
    start = torch.from_numpy(np.repeat(prefix, q_lens))
    buffers.set_mask(MaskLayout(q_lens, kv_lens, start, visible.shape[1]), torch.from_numpy(visible))
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
        layout = MaskLayout(np.array([4]), np.array([6]), torch.zeros(4, dtype=torch.int64), 6)
        buffers.set_mask(layout, torch.ones(4, 6, dtype=torch.bool))

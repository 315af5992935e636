"""The Triton kernel against SDPA. With TRITON_INTERPRET=1, before Triton is imported, it needs no GPU."""

from __future__ import annotations

import sys

import numpy as np
import torch

from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TritonKernel
from adaserve.engine.gpu.layout import Extent
from adaserve.engine.gpu.layout_kernel import change_fused
from tests.engine.gpu.test_layout import random_case


def compare(seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference over ragged requests, windows and padding; two runs of one plan, between which
    the mask changes as it does between draft steps."""
    extent, seen, _ = random_case(seed)
    extent = Extent(np.append(extent.q_lens, [3, 0]), np.append(extent.kv_lens, [1, 1]))
    generator = torch.Generator().manual_seed(seed)
    pool, used = int(extent.kv_lens.sum()) + 20, int(extent.kv_lens[:-2].sum())
    keys, values = (torch.randn(pool, 2, 32, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(int(extent.q_lens.sum()), 4, 32, generator=generator).to(device, dtype)
    buffers = AttentionBuffers.allocate(512, 512, device, unpacked=True)
    assert buffers.mask_bytes is not None
    buffers.kv_indices.fill_(7)
    buffers.kv_indices[:used].copy_(torch.randperm(pool, generator=generator)[:used])
    buffers.kv_indices[used : used + 2].zero_()
    words, ends = buffers.mask.view(torch.int32), torch.from_numpy(extent.window_ends)[None].to(device)
    kernel, reference = TritonKernel(buffers, len(extent.q_lens)), SdpaKernel(buffers)
    kernel.plan(extent)
    reference.plan(extent)
    worst = 0.0
    for visible in (seen, ~seen):
        padded = np.pad(visible, ((0, 3), (0, 0)), constant_values=True)
        there = torch.from_numpy(padded)[None].to(device)
        change_fused(words, buffers.mask_bytes, ends, there, shows=False)
        right, got = (k.run(q, keys, values, 0.3) for k in (reference, kernel))
        change_fused(words, buffers.mask_bytes, ends, there, shows=True)
        assert buffers.mask.eq(255).all() and buffers.mask_bytes.eq(1).all()
        # A token that sees nothing is none of ours: its softmax is 0 / 0.
        prefix = np.repeat(extent.kv_lens - seen.shape[1], extent.q_lens) > 0
        sees = torch.from_numpy(prefix | padded.any(1))
        worst = max(worst, float((right - got)[sees.to(device)].abs().max()))
    return worst


if __name__ == "__main__":
    print(*(compare(int(seed), torch.device("cpu")) for seed in sys.argv[1:]))

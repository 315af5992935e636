"""The Triton kernel against SDPA. With TRITON_INTERPRET=1, before Triton is imported, it needs no GPU."""

from __future__ import annotations

import numpy as np
import torch

from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, set_out
from adaserve.engine.gpu.attention_layout import Extent, seen_by
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.kernel_choice import own_kernel
from adaserve.engine.trees.attention import Scores
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import CPU
from tests.engine.gpu.test_attention_layout import random_case

PLAIN = Scores(0.3)


def compare(
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    scores: Scores = PLAIN,
    q_heads: int = 4,
) -> float:
    """The largest difference over ragged requests, windows and padding; two runs of one plan, between which
    the mask changes as it does between draft steps."""
    extent, seen, _ = random_case(seed)
    # Every other case has contexts that are cut into parts.
    longer = 300 * (seed % 2) * np.arange(len(extent.q_lens))
    extent = Extent(np.append(extent.q_lens, [3, 0]), np.append(extent.kv_lens + longer, [1, 1]))
    generator = torch.Generator().manual_seed(seed)
    pool, used = int(extent.kv_lens.sum()) + 20, int(extent.kv_lens[:-2].sum())
    keys, values = (torch.randn(pool, 2, 32, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(int(extent.q_lens.sum()), q_heads, 32, generator=generator).to(device, dtype)
    buffers = AttentionBuffers.allocate(pool, int(extent.byte_starts[-1]), device)
    buffers.kv_indices.fill_(7)
    buffers.kv_indices[:used].copy_(torch.randperm(pool, generator=generator)[:used])
    buffers.kv_indices[used : used + 2].zero_()
    ends = torch.from_numpy(extent.window_ends)[None].to(device)
    # As if each token were one of the last eight of its text; padding's may be any.
    positions = np.repeat(extent.kv_lens, extent.q_lens) - 1 - np.arange(len(q)) % 8
    positions = torch.from_numpy(positions.clip(0)).to(device)
    heads = AttentionShape(q_heads, 2, 32, 0.3, dtype, dtype)
    kernel = own_kernel(heads, device)(buffers, len(extent.q_lens), 0)
    reference = SdpaKernel(buffers)
    set_out(kernel, extent, device)
    reference.plan(extent)
    worst = 0.0
    for visible in (seen, ~seen):
        padded = np.pad(visible, ((0, 3), (0, 0)), constant_values=True)
        there = torch.from_numpy(padded)[None].to(device)
        outputs = []
        for one in (reference, kernel):
            with one.hiding(ends, there):
                outputs.append(one.run(q, keys, values, scores, positions))
        right, got = outputs
        # A token that sees nothing is none of ours: its softmax is 0 / 0.
        prefix = np.repeat(extent.kv_lens - seen.shape[1], extent.q_lens) > 0
        sees = torch.from_numpy(prefix | padded.any(1))
        worst = max(worst, float((right - got)[sees.to(device)].abs().max()))
    return worst


def prompts(columns: int = 96) -> float:
    """The same of texts that are read, the longest over several tiles, in windows wider than some of them."""
    q_lens, starts, generator = np.array([70, 17, 1]), np.array([5, 0, 300]), torch.Generator().manual_seed(0)
    extent, tokens = Extent(q_lens, starts + q_lens), int(q_lens.sum())
    seen = seen_by(TreeBatch.causal(np.zeros(tokens, np.int64), np.arange(3), starts, q_lens))
    seen = np.pad(seen, ((0, 0), (columns - seen.shape[1], 0)), constant_values=True)
    pool = int(extent.kv_lens.sum())
    keys, values = (torch.randn(pool, 2, 32, generator=generator) for _ in range(2))
    q = torch.randn(tokens, 4, 32, generator=generator)
    buffers = AttentionBuffers.allocate(pool, int(extent.byte_starts[-1]), CPU)
    buffers.kv_indices.copy_(torch.randperm(pool, generator=generator))
    outputs, heads = [], AttentionShape(4, 2, 32, 0.3, torch.float32, torch.float32)
    for kernel in (own_kernel(heads, CPU)(buffers, len(q_lens), 0), SdpaKernel(buffers)):
        set_out(kernel, extent, CPU)
        with kernel.hiding(torch.from_numpy(extent.window_ends)[None], torch.from_numpy(seen)[None]):
            outputs.append(kernel.run(q, keys, values, PLAIN))
    return float((outputs[0] - outputs[1]).abs().max())


def hidden(number: float) -> torch.Tensor:
    """What two tokens say whose window ends in a slot that neither sees, and that holds ``number``."""
    heads = AttentionShape(4, 2, 32, 0.3, torch.float32, torch.float32)
    extent = Extent(np.array([2]), np.array([8]))
    generator, buffers = torch.Generator().manual_seed(0), AttentionBuffers.allocate(8, 2, CPU)
    q, keys, values = (torch.randn(n, h, 32, generator=generator) for n, h in ((2, 4), (8, 2), (8, 2)))
    buffers.kv_indices.copy_(torch.arange(8))
    keys[-1] = values[-1] = number
    kernel, seen = own_kernel(heads, CPU)(buffers, 1, 0), torch.tensor([[[1, 0, 0], [1, 1, 0]]]).bool()
    set_out(kernel, extent, CPU)
    with kernel.hiding(torch.from_numpy(extent.window_ends)[None], seen):
        return kernel.run(q, keys, values, PLAIN)


def mixed(kind: torch.dtype, kept: torch.dtype) -> float:
    """The largest difference where a model of one ``kind`` has a pool that is ``kept`` in another."""
    extent, heads = Extent(np.array([2]), np.array([8])), AttentionShape(4, 2, 32, 0.3, kind, kept)
    generator, buffers = torch.Generator().manual_seed(0), AttentionBuffers.allocate(8, 2, CPU)
    q, keys, values = (torch.randn(n, h, 32, generator=generator) for n, h in ((2, 4), (8, 2), (8, 2)))
    buffers.kv_indices.copy_(torch.arange(8))
    outputs = []
    for kernel in (own_kernel(heads, CPU)(buffers, 1, 0), SdpaKernel(buffers)):
        set_out(kernel, extent, CPU)
        outputs.append(kernel.run(q.to(kind), keys.to(kept), values.to(kept), PLAIN))
    right = outputs[1]
    assert outputs[0].dtype == right.dtype == kind
    return float((outputs[0] - right).abs().max())


def far_slots() -> float:
    """The largest difference in a pool of more than 2^31 numbers, of which hardly any is ever touched."""
    far, dim = 1 << 30, 32
    room = torch.empty(2 * far + dim, dtype=torch.float16)
    pool, generator = room.as_strided((3, 1, dim), (far, dim, 1)), torch.Generator().manual_seed(0)
    pool.copy_(torch.randn(3, 1, dim, generator=generator))
    q = torch.randn(1, 2, dim, generator=generator).half()
    extent, buffers = Extent(np.ones(1, np.int64), np.full(1, 3)), AttentionBuffers.allocate(3, 1, CPU)
    buffers.kv_indices.copy_(torch.tensor([2, 0, 1]))
    outputs, heads = [], AttentionShape(2, 1, dim, 0.3, torch.float16, torch.float16)
    for kernel in (own_kernel(heads, CPU)(buffers, 1, 0), SdpaKernel(buffers)):
        set_out(kernel, extent, CPU)
        outputs.append(kernel.run(q, pool, pool, PLAIN))
    return float((outputs[0] - outputs[1]).abs().max())

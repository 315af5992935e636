"""What only a GPU can say; ``pytest -m gpu`` there. The whole of it, with models, is ``make gpu-check``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.bench.gpu_check.kernels import check_filters, check_noise
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, set_out
from adaserve.engine.gpu.attention_layout import Extent, change_tree_mask
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.flashinfer_kernel import INT_WORKSPACE_BYTES, FlashInferKernel
from adaserve.engine.gpu.flashinfer_planner import WORKSPACE_BYTES
from adaserve.engine.transfer import put
from adaserve.engine.trees.attention import Scores
from tests.engine.gpu.test_attention_layout import random_case
from tests.engine.gpu.triton_check import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS = AttentionShape(8, 2, 64, 0.125, torch.float16, torch.float16)


@pytest.mark.parametrize("seed", range(5))
def test_flashinfer_reads_our_arrays_as_sdpa_does(seed: int) -> None:
    """Ragged requests, windows, a request of nothing but padding; eagerly and from a captured graph."""
    device = torch.device("cuda")
    extent, visible, masks = random_case(seed)
    q_lens, kv_lens = np.append(extent.q_lens, [3, 0]), np.append(extent.kv_lens, [1, 1])
    extent, seen = Extent(q_lens, kv_lens), np.pad(visible, ((0, 3), (0, 0)), constant_values=True)
    generator = torch.Generator(device).manual_seed(seed)
    pool = int(kv_lens.sum()) + 20
    keys, values = (torch.randn(pool, 2, 64, generator=generator, device=device).half() for _ in range(2))
    q = torch.randn(int(q_lens.sum()), 12, 64, generator=generator, device=device).half()[:, :8]
    buffers = AttentionBuffers.allocate(4096, 4096, device)
    used = int(kv_lens[:-2].sum())
    buffers.kv_indices[:used].copy_(torch.randperm(pool, generator=generator, device=device)[:used])
    ends, there = put({"ends": extent.window_ends, "seen": seen}, device).values()
    change_tree_mask(buffers.mask, ends[None], there[None], shows=False)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    integers = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    kernel, reference = (
        FlashInferKernel(buffers, len(q_lens), HEADS, workspace, integers),
        SdpaKernel(buffers),
    )
    for one in (kernel, reference):
        set_out(one, extent, device)
    sees = torch.tensor([*np.concatenate([m.any(1) for m in masks]), True, True, True], device=device)
    right = reference.run(q, keys, values, Scores(HEADS.scaling))
    torch.testing.assert_close(
        kernel.run(q, keys, values, Scores(HEADS.scaling))[sees], right[sees], rtol=2e-2, atol=2e-3
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run(q, keys, values, Scores(HEADS.scaling))
    graph.replay()
    torch.testing.assert_close(out[sees], right[sees], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("seed", range(5))
def test_triton_reads_our_arrays_as_sdpa_does(seed: int) -> None:
    assert compare(seed, torch.device("cuda"), torch.float16) < 2e-2


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_noise_is_that_of_torch(dtype: str) -> None:
    assert check_noise(96, 32_000, dtype, torch.device("cuda"))["right"]


def test_filters_keep_what_sorting_keeps() -> None:
    assert check_filters(40, 128_256, torch.device("cuda"))["right"]

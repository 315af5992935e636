"""What only a GPU can say; ``pytest -m gpu`` there. The whole of it, with models, is ``make gpu-check``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.device.attention import (
    INT_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    AttentionBuffers,
    Extent,
    FlashInferKernel,
    HeadShape,
    SdpaKernel,
)
from adaserve.engine.device.choose import choose
from adaserve.engine.device.layout import MaskLayout
from adaserve.engine.device.selection import TreeGrid
from adaserve.engine.device.transfer import HostCopy
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from tests.engine.device.test_layout import random_case
from tests.engine.device.test_selection import random_beam, running, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS = HeadShape(8, 2, 64, 0.125, torch.float16, torch.float16)


@pytest.mark.parametrize("seed", range(5))
def test_flashinfer_reads_our_arrays_as_sdpa_does(seed: int) -> None:
    """Ragged requests, windows, a request of nothing but padding; eagerly and from a captured graph."""
    device = torch.device("cuda")
    q_lens, prefix, visible, _ = random_case(seed)
    q_lens, kv_lens = np.append(q_lens, [3, 0]), np.append(prefix + visible.shape[1], [1, 1])
    seen = torch.nn.functional.pad(torch.from_numpy(visible), (0, 0, 0, 3)).to(device)
    start = torch.from_numpy(np.append(np.repeat(prefix, q_lens[:-2]), [1, 1, 1])).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    pool = int(kv_lens.sum()) + 20
    keys, values = (torch.randn(pool, 2, 64, generator=generator, device=device).half() for _ in range(2))
    q = torch.randn(int(q_lens.sum()), 8, 64, generator=generator, device=device).half()
    buffers = AttentionBuffers.allocate(4096, 4096, device)
    buffers.set_slots(
        torch.randperm(pool, generator=generator, device=device)[: int(kv_lens[:-2].sum())].int(), 2
    )
    buffers.set_mask(MaskLayout(q_lens, kv_lens, start, visible.shape[1]), seen)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    integers = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    kernel, reference = (
        FlashInferKernel(buffers, len(q_lens), HEADS, workspace, integers),
        SdpaKernel(buffers),
    )
    for one in (kernel, reference):
        one.plan(Extent(q_lens, kv_lens))
    sees = torch.tensor([bool(m.any()) for m in seen.cpu()], device=device)
    sees |= torch.from_numpy(np.repeat(np.append(prefix > 0, [True, True]), q_lens)).to(device)
    right = reference.run(q, keys, values, HEADS.scaling)
    torch.testing.assert_close(
        kernel.run(q, keys, values, HEADS.scaling)[sees], right[sees], rtol=2e-2, atol=2e-3
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run(q, keys, values, HEADS.scaling)
    graph.replay()
    torch.testing.assert_close(out[sees], right[sees], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["adaserve", "equal-greedy", "chain-3", "priced"])
def test_selection_waits_once(name: str) -> None:
    """CUDA itself raises where the host would wait, but for the copy of the counts."""
    trees = random_beam(np.random.default_rng(0), 8, 4, 3)
    host = to_device(trees)
    grid = TreeGrid(*(t.cuda() for t in (host.parent, host.depth, host.logprob, host.size)), host.deepest)
    policy = build_policy(name, PolicyConfig(latency=default_latency(), budget=30))
    plan = policy.plan(running(8), 1.0)
    right = choose(policy, plan, host, trees.n_nodes)
    waits = 0
    counts = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return counts(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    torch.Tensor.cpu = counted  # type: ignore[method-assign, assignment]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = choose(policy, plan, grid, trees.n_nodes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.Tensor.cpu = counts  # type: ignore[method-assign]
    assert waits == 1 and got.counts.tolist() == right.counts.tolist()
    copied = HostCopy(keep=got.kept.keep).read()
    assert np.array_equal(copied["keep"], right.kept.keep.numpy())

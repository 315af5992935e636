"""Which kernel does the attention of tree forwards."""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.gpu.attention import AttentionBuffers, MakeKernel, SdpaKernel, TreeKernel, set_out
from adaserve.engine.gpu.attention_layout import Extent
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.flashinfer_kernel import INT_WORKSPACE_BYTES, FlashInferKernel
from adaserve.engine.gpu.flashinfer_planner import workspace_bytes
from adaserve.engine.trees.attention import Scores
from adaserve.errors import UnsupportedError
from adaserve.host.device import NO_E4M3, reads_e4m3

logger = logging.getLogger(__name__)

Attention = Literal["auto", "flashinfer", "triton"]
"""A setting: auto is Triton, our own kernel, which was the faster one on an H200 at nine of ten sizes."""
Kernel = Literal["sdpa", "flashinfer", "triton"]


def kernel_maker(
    setting: Attention | Kernel, runner: Any, device: torch.device, rows: int, tokens: int
) -> tuple[Kernel, MakeKernel]:
    """The kernel that serves, by name: what ``setting`` says on CUDA, but Triton's where FlashInfer cannot be
    compiled or run, or computes something else; SDPA elsewhere. Its forwards have at most ``rows`` requests,
    padding included, with ``tokens`` in all. Raises UnsupportedError."""
    heads = AttentionShape.of(runner)
    if device.type != "cuda":
        return "sdpa", lambda buffers, rows, place: SdpaKernel(buffers)
    if heads.kv_dtype == torch.float8_e4m3fn and not reads_e4m3():  # as a checkpoint may ask
        raise UnsupportedError(NO_E4M3)
    if setting == "flashinfer" and heads.needs_own_kernel:
        logger.warning(
            "AdaServe: FlashInfer does not serve trees with sliding windows, capped scores or a KV cache in "
            "8 bits, so our own kernel in Triton does"
        )
    if setting != "flashinfer" or heads.needs_own_kernel:
        return "triton", own_kernel(heads, device)
    workspace = torch.empty(workspace_bytes(heads, rows, tokens), dtype=torch.uint8, device=device)
    plans: dict[int, Tensor] = {}

    def flashinfer(buffers: AttentionBuffers, rows: int, place: int) -> TreeKernel:
        if place not in plans:
            plans[place] = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return FlashInferKernel(buffers, rows, heads, workspace, plans[place])

    return usable(flashinfer, heads, device)


def own_kernel(heads: AttentionShape, device: torch.device) -> MakeKernel:
    """Triton's, for a model with such heads."""
    from adaserve.engine.gpu.attention_kernel import TritonKernel, Workspace

    workspace = Workspace(heads, device)
    return lambda buffers, rows, place: TritonKernel(buffers, rows, workspace)


def usable(make: MakeKernel, heads: AttentionShape, device: torch.device) -> tuple[Kernel, MakeKernel]:
    """FlashInfer's ``make`` if its kernel can be planned, which compiles it, and run; else Triton's, with a
    sentence in the log."""
    try:
        kernel = make(AttentionBuffers.allocate(8, 8, device), 1, 0)
        set_out(kernel, Extent(np.array([1]), np.array([1])), device)
        q = torch.zeros(1, heads.q_heads, heads.head_dim, dtype=heads.q_dtype, device=device)
        pool = torch.zeros(1, heads.kv_heads, heads.head_dim, dtype=heads.kv_dtype, device=device)
        kernel.run(q, pool, pool, Scores(heads.scaling))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or what it failed with shows later
    except Exception as error:  # nvcc, ninja, a header, a library: it can be anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        logger.warning(
            "AdaServe: FlashInfer cannot be compiled or run here, so our own kernel in Triton serves: %s",
            reason, exc_info=error,
        )  # fmt: skip
        return "triton", own_kernel(heads, device)
    return "flashinfer", make

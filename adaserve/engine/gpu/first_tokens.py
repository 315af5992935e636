"""The first token after a prompt is SGLang's draw: its kernels, ready before the first request."""

from __future__ import annotations

import torch
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import get_exec

from adaserve.errors import UnsupportedError


def compile_sampler(vocabulary: int, device: torch.device) -> None:
    """Compiles or loads FlashInfer's kernels for top-k, top-p and min-p, if the server draws with these: the
    first request that filters would wait for nvcc, and everybody with it.

    Raises UnsupportedError with the remedy where it fails, or that request would end the server.
    """
    if get_exec().kernel.sampling_backend != "flashinfer":
        return
    probabilities = torch.full((2, vocabulary), 1 / vocabulary, device=device)
    top_p = torch.ones(2, device=device)
    try:
        sampler.top_k_top_p_sampling_from_probs(
            probabilities, torch.ones_like(top_p, dtype=torch.int32), top_p, filter_apply_order="joint"
        )
        sampler.min_p_sampling_from_probs(probabilities, top_p)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or what it failed with shows later
    except Exception as error:  # nvcc, ninja, a header, a library: it can be anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        raise UnsupportedError(
            f"FlashInfer's sampler cannot be compiled or run here ({reason}): use --sampling-backend pytorch"
        ) from error

"""KV memory of a token counts for target and drafts, and memory for our own buffers on a GPU is set aside.

Why: SGLang sizes the KV pools from what is free after all models were loaded, but adds a draft's KV to a
token's cost for its own EAGLE and STANDALONE only. Without this hook a draft's pool, which has as many
slots as the target's, would be allocated on top of memory that is already given away.

Tensor-parallel ranks on GPUs that can multicast gather logits in a buffer of each model, which SGLang makes
for the largest trees of all requests, in the memory that is left: 0.8 GB for each model with 128k tokens and
64 requests of 49. So it is smaller here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.plugins.hook_registry import HookType

from adaserve.checkpoints.draft_kind import draft_kind
from adaserve.checkpoints.medusa import weights_file
from adaserve.config import AdaServeConfig
from adaserve.patches import hook

DEVICE_RESERVE_BYTES = 3 << 29
"""Attention workspaces (17 or 34 MB for each model, 264 MiB with FlashInfer), static inputs, and CUDA graphs:
194 of a pair like Llama 8B and 1B, with depths up to 5, took 0.7 GB on an H200."""

RESERVE_BYTES_PER_WORD = 6 << 10
"""For each token of the vocabulary: 512 rows of logits in fp32 in the buffer that graphs share, as many in
the graphs' own memory, and those of the draft."""

MAX_CAPTURED_TOKENS = 512
"""Of a forward that has a graph. Logits of more are gathered by NCCL."""


def register() -> None:
    target = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__"
    hook(target, _count_draft, HookType.AFTER)
    gather = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.recommended_max_tokens"
    hook(gather, lambda usual, **_: min(usual, MAX_CAPTURED_TOKENS), HookType.AFTER)


def _count_draft(_: None, configurator: Any, kvc: Any) -> None:
    if kvc.is_draft_worker:
        return
    ours = AdaServeConfig.load()
    for path in draft_paths(ours):
        config = draft_config(kvc.server_args, path)
        configurator._cell_size += draft_bytes_per_token(config)
        if draft_kind(config.hf_config.architectures, ours.draft_kind, path) != "model":
            configurator._cell_size += hidden_bytes_per_token(config, kvc.kv_cache_dtype)
    if ours.medusa is not None:
        configurator._cell_size += hidden_bytes_per_token(kvc.model_config, kvc.kv_cache_dtype)
    if str(kvc.device).startswith("cuda"):
        vocabulary = int(kvc.model_config.vocab_size)
        configurator._fixed_overhead_bytes += DEVICE_RESERVE_BYTES + RESERVE_BYTES_PER_WORD * vocabulary
        if ours.medusa is not None:  # SGLang does not load them
            configurator._fixed_overhead_bytes += weights_file(Path(ours.medusa)).stat().st_size


def draft_paths(config: AdaServeConfig) -> tuple[str, ...]:
    """The draft models that SGLang loads in this process: its own, then ours."""
    from sglang.srt.runtime_context import get_spec

    if not config.has_model or config.medusa is not None:
        return ()
    return tuple(path for path in (get_spec().speculative_draft_model_path, config.second_draft) if path)


def draft_config(server_args: Any, path: str, **more: Any) -> Any:
    """SGLang's configuration of the draft model at ``path``."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    first = path == spec.speculative_draft_model_path
    revision = spec.speculative_draft_model_revision if first else "main"
    return ModelConfig.from_server_args(
        server_args, model_path=path, model_revision=revision, is_draft_model=True, **more
    )


def hidden_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """The hidden state that heads read of a token of the target; ``dtype``: of its KV."""
    return int(config.hidden_size * states_dtype(dtype, config.dtype).itemsize)


def states_dtype(of_kv: torch.dtype, of_model: torch.dtype) -> torch.dtype:
    """How hidden states are kept: as keys and values are, but not in 8 bits: scales are for these alone."""
    return of_model if of_kv.itemsize == 1 else of_kv


def draft_bytes_per_token(config: Any) -> int:
    """Keys and values of one token in every layer of the draft, on one rank. A checkpoint of the target in 8
    bits may bring a KV cache in 8 bits with it, which is none for the draft."""
    from sglang.srt.runtime_context import get_model, get_parallel, get_spec

    parallel = get_parallel()
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=config.dtype,
        is_draft_worker=True,
        is_dflash=False,
        speculative_draft_attention_backend="",
        speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
    )
    heads = config.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    # An MTP layer's config is its target's.
    layers = config.num_nextn_predict_layers or config.num_hidden_layers
    return int(2 * layers * heads * config.head_dim * dtype.itemsize)

"""Puts our own forward under a model that SGLang has loaded, so that every path uses it."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from adaserve.engine.cpu.extract import read_weights
from adaserve.engine.cpu.kernel_support import obstacle
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.params import Inputs
from adaserve.host.cores import usable_cores

logger = logging.getLogger(__name__)

LLAMA_ATTRIBUTE = "adaserve_llama"


def limit_threads() -> None:
    """As many of torch's as this process may use, where it was started without our command line, which says
    so in its environment."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())


def install(model: Any, storage: Storage) -> None:
    """Replaces the decoder stack's forward and the product that makes logits. Where the model isn't covered,
    a warning says why."""
    if (reason := obstacle(model)) is not None:
        logger.warning("AdaServe: SGLang's own CPU forward is used, which is slower: %s", reason)
        return
    grow_rotary_table(model)
    llama = LlamaModel(*read_weights(model), storage)
    object.__setattr__(model, LLAMA_ATTRIBUTE, llama)

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

        if (states := llama.take_read(len(input_ids))) is not None:
            return states
        pool = get_token_to_kv_pool()
        inputs = Inputs(input_ids, positions, forward_batch.out_cache_loc, get_attn_backend().plan)
        return llama.forward(inputs, pool.k_buffer, pool.v_buffer)

    def logits(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Bit by bit those of verifications, and without torch's threads, which wait for each other."""
        return llama.logits(hidden_states)

    model.model.forward = forward
    model.logits_processor._compute_lm_head = logits


def llama_of(model: Any) -> LlamaModel | None:
    """Our forward under a model that SGLang has loaded; None where that is SGLang's own."""
    llama: LlamaModel | None = getattr(model, LLAMA_ATTRIBUTE, None)
    return llama


def store_again(model: Any, storage: Storage) -> None:
    """Stores the weights of a draft with our own forward again, in another format or without tokens that it
    should not know: when the model is loaded, it is not yet known that it is a draft."""
    llama = llama_of(model)
    if llama is not None and (llama.storage != storage or getattr(model, "hot_token_id", None) is not None):
        llama.store(read_weights(model)[0], storage)


_TREE_HEADROOM = 64
"""Positions beyond the context that a tree of a request near its end may touch; they are never kept."""


def grow_rotary_table(model: Any) -> None:
    """Makes cos/sin reach every position that a forward may see: the kernels refuse what lies beyond.

    SGLang grows the table as well, but after this hook, when its address is already in our hands. A draft
    with a shorter context of its own is asked for the target's positions too.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.runtime_context import get_server_args

    needed = ModelConfig.from_server_args(get_server_args()).context_len + _TREE_HEADROOM
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module._ensure_cos_sin_cache_length(needed)

"""Drafts that know only the most frequent tokens (FR-Spec, section 3): ``--speculative-token-map``.

A draft step reads its whole output matrix and looks through as many logits. A small part of a vocabulary
makes up most text, so a draft may keep only the rows of these tokens. The target still writes any token: a
draft only guesses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.speculative.spec_utils import load_token_map
from torch import Tensor

from adaserve.errors import UnsupportedError

FLAG = "--speculative-token-map"
PLAIN = (torch.float16, torch.bfloat16, torch.float32)
"""Types of weights that are not quantized."""


def token_map(path: str, vocabulary: int, least: int) -> Tensor:
    """int64 [k]: the tokens that a draft keeps, by a file as SGLang reads it: a list of ids, written by
    ``torch.save``. ``vocabulary``: the draft's; ``least``: how many a draft step needs.

    Raises UnsupportedError.
    """
    try:
        ids = load_token_map(path)
    except Exception as error:  # of a file, of what it holds, or of a model hub
        found = "" if Path(path).exists() else "there is no such file, and on model hubs: "
        raise UnsupportedError(
            f"{FLAG} {path} cannot be read ({found}{error}): give a file that torch.save has written, with "
            "a list of token ids"
        ) from error
    known = ids[(ids >= 0) & (ids < vocabulary)].unique()
    if ids.dim() != 1 or len(known) != len(ids) or len(ids) < least:
        raise UnsupportedError(
            f"{FLAG} {path} must list at least {least} different ids from 0 to {vocabulary - 1}, the draft's "
            f"tokens: it has {ids.numel()}, and {len(known)} of them are different tokens of the draft"
        )
    return ids


def keep_tokens(model: Any, ids: Tensor, path: str) -> None:
    """From now on SGLang's ``model``, the draft at ``path``, has logits of the tokens ``ids`` [k] alone, in
    their order. They are called ``hot_token_id``, as SGLang does in heads. Raises UnsupportedError."""
    weight, processor = output_matrix(model), getattr(model, "logits_processor", None)
    if processor is None or weight is None:
        raise UnsupportedError(
            f"{type(model).__name__}, the draft {path}, has no output matrix to take rows of, or one that is "
            f"quantized or has a bias: leave {FLAG} out"
        )
    if get_tp_group().world_size > 1:  # each rank has its part of the rows
        weight = get_tp_group().all_gather(weight, dim=0)
    with weight.device:
        kept = ParallelLMHead(len(ids), weight.shape[1], params_dtype=weight.dtype)
    kept.weight_loader(kept.weight, weight[ids.to(weight.device)])
    model.lm_head, model.hot_token_id = kept, ids
    processor.vocab_size = len(ids)
    processor.forward = partial(_forward, processor.forward, kept)


def output_matrix(model: Any) -> Tensor | None:
    """[V, H]: what SGLang's ``model`` makes its logits with; None where it is quantized or has a bias, or
    belongs to a model inside."""
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    matrix = getattr(model, "lm_head", embedding)  # Gemma makes logits with its embedding
    weight: Tensor | None = getattr(matrix, "weight", None)
    is_plain = weight is not None and weight.dtype in PLAIN
    return weight if is_plain and getattr(matrix, "bias", None) is None else None


def _forward(forward: Any, kept: Any, input_ids: Any, states: Any, _: Any, *more: Any, **named: Any) -> Any:
    """Whatever matrix a model makes its logits with."""
    return forward(input_ids, states, kept, *more, **named)

"""What heads read of the target, on every device: hidden states by KV slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adaserve.checkpoints.draft_kind import MTP
from adaserve.errors import UnsupportedError
from adaserve.patches.start.kv_sizing import states_dtype


class HiddenStates:
    """The target's hidden states that heads read, by KV slot: one state of every cached token, ``size`` wide.

    The target writes them wherever it writes KV, so they are there for all cached tokens, also for those of a
    prefix that was read for another request. They are made by ``project`` from the inputs of ``layers``, or,
    if it is None, are the output of the target's final norm.
    """

    def __init__(
        self,
        slots: int,
        size: int,
        dtype: torch.dtype,
        layers: Sequence[int] = (),
        project: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.layers = torch.tensor(layers, dtype=torch.int32)
        self.project = project
        self.by_slot = torch.zeros(slots, size, dtype=dtype, device=device)

    @torch.no_grad()
    def write(self, slots: Tensor, states: Tensor, last: Tensor) -> None:
        """``states``: [T, layers, H of the target] or [T, layers * H], what goes into each of the layers;
        ``last``: [T, H of the target], what comes out of the final norm."""
        made = last if self.project is None else self.project(states)
        self.by_slot[slots] = made.to(self.by_slot.dtype)

    def read(self, slots: Tensor) -> Tensor:
        """[.., size], as they are stored."""
        return self.by_slot[slots]

    def of_requests(self, req_to_token: Tensor, pool_rows: Tensor, places: Tensor) -> Tensor:
        """[.., size] of the tokens whose KV stands at ``places`` of ``pool_rows`` of ``req_to_token``."""
        return self.read(req_to_token[pool_rows, places].long())

    def move_kv_cache(self, target: Tensor, source: Tensor) -> None:
        """Named as in SGLang's KV pools, beside which this is moved."""
        self.by_slot[target] = self.by_slot[source]


def project(head: Any, states: Tensor) -> Tensor:
    """[T, H] of [T, layers, H of the target], as SGLang's ``llama_eagle3.LlamaModel.forward`` does it."""
    joined = states.flatten(1).to(head.fc.weight.dtype)
    if head.input_norm is not None:
        joined = head.input_norm(joined)
    if head.fc_norm is not None:
        parts = joined.chunk(head.num_aux_hidden_states, dim=-1)
        joined = torch.cat([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], dim=-1)
    projected: Tensor = head.fc(joined)
    return projected


def layers_to_capture(target: Any, head: Any) -> list[int]:
    """Layers of the target whose inputs the head reads, in ascending order: by the head's configuration, or
    those that SGLang takes by default. Raises UnsupportedError."""
    if not hasattr(target, "set_eagle3_layers_to_capture"):
        raise UnsupportedError(
            f"the draft is an EAGLE-3 head, and SGLang's {type(target).__name__} hands out no hidden states: "
            "serve a target of another architecture, or a draft model"
        )
    options = getattr(head.config, "eagle_config", None) or {}
    target.set_eagle3_layers_to_capture(options.get("eagle_aux_hidden_state_layer_ids"))
    target.capture_aux_hidden_states = False  # our forward keeps them itself
    layers = sorted(set(target.model.layers_to_capture))
    wanted, known = head.model.num_aux_hidden_states, target.config.num_hidden_layers
    if len(layers) != wanted or layers[0] < 0 or layers[-1] >= known:
        raise UnsupportedError(
            f"the EAGLE-3 head reads {wanted} hidden states, and these layers of the target's {known} would "
            f"give them: {layers}. Serve the target that the head was trained for, or set "
            "eagle_config.eagle_aux_hidden_state_layer_ids in the head's config.json"
        )
    return layers


def hidden_states(target: Any, head: Any) -> HiddenStates:
    """What SGLang's model of a head reads of the ``ModelRunner`` ``target``. Raises UnsupportedError."""
    if type(head).__name__ == MTP:
        require_same_sizes(target.model.config, head.config)
        return final_states(target, head.config.hidden_size)
    require_own_tokens(head)
    pool, layers = target.token_to_kv_pool.k_buffer[0], layers_to_capture(target.model, head)
    size, made = head.config.hidden_size, partial(project, head.model)
    return HiddenStates(pool.shape[0], size, _dtype(target), layers, made, pool.device)


def require_same_sizes(target: Any, layer: Any) -> None:
    """Raises UnsupportedError where the configuration of an MTP layer is not that of its target: the
    kernels, which are given the target's matrices, do not check their sizes."""
    of_layer, of_target = ((c.hidden_size, c.vocab_size) for c in (layer, target))
    if of_layer != of_target:
        raise UnsupportedError(
            "the MTP layer works with hidden states of {} numbers and {} tokens, and the target with {} and "
            "{}: serve the target whose checkpoint the layer is in".format(*of_layer, *of_target)
        )


def require_own_tokens(head: Any) -> None:
    """Raises UnsupportedError where two output rows of an EAGLE-3 head stand for one token, or one for none:
    children of a node must differ, or two of them would be accepted."""
    ids = getattr(head, "hot_token_id", None)
    if ids is None:  # every row stands for the token of its number
        return
    tokens = head.config.vocab_size
    rows = getattr(head.config, "draft_vocab_size", None) or tokens
    known = ids[(ids >= 0) & (ids < tokens)].unique()
    if len(ids) != rows or len(known) < rows:
        raise UnsupportedError(
            f"the EAGLE-3 head has {rows} output rows, and its tensor d2t gives {len(ids)} rows "
            f"{len(known)} different tokens of {tokens}: each row needs a token of its own. Download the "
            "head again"
        )


def final_states(target: Any, size: int) -> HiddenStates:
    """What comes out of the final norm of the ``ModelRunner`` ``target``, ``size`` wide."""
    pool = target.token_to_kv_pool.k_buffer[0]
    return HiddenStates(pool.shape[0], size, _dtype(target), device=pool.device)


def _dtype(target: Any) -> torch.dtype:
    return states_dtype(target.token_to_kv_pool.dtype, target.dtype)

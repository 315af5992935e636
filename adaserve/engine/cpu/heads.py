"""Heads on a CPU host: drafts that read the target's hidden states.

A head (EAGLE-3, section 3) is one decoder layer. For a token it takes in the token's embedding and a hidden
state of the token before: the target's, projected from three of its layers, where the target has read that
token; its own last output where it drafts further. SGLang's class loads the checkpoint and projects; our
kernels run the layer.

An MTP layer (DeepSeek-V3, section 2.2) is a head of the same kind, which ships inside the target's
checkpoint. It reads what comes out of the target's final norm, and hands on what comes out of its own.

A token's key and value in the head follow from the tokens up to it, as in a draft model. They stand in its
own slot, so what holds for a draft's KV cache (``DraftCache``) holds for a head's, shared prefixes and holes
included. The first token of a text has nothing before it, and heads do not read it. SGLang stores the
same values one place earlier, where they depend on the token that follows. Positions are those of the text,
one more than SGLang's: rotary embeddings see differences only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.draft_kind import EAGLE3, MTP
from adaserve.engine.cpu.extract import head_obstacle, mtp_obstacle, read_head, read_mtp
from adaserve.engine.cpu.forwards import CpuForward, LeanForward
from adaserve.engine.cpu.install import LEAN_ATTRIBUTE, grow_rotary_table
from adaserve.engine.cpu.lean import LeanModel
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.params import Before, ModelConfig, ModelWeights
from adaserve.engine.device import KeepGoing, Ready, Search
from adaserve.engine.search import Levels
from adaserve.engine.trees.attention import token_slots
from adaserve.engine.trees.batch import Gap, TreeBatch


class HiddenStates:
    """What heads read of the target, by KV slot: one hidden state of every cached token, ``size`` wide.

    The target writes them wherever it writes KV, so they are there for all cached tokens, also for those of a
    prefix that was read for another request. They are made by ``project`` of what goes into ``layers``, or,
    where it is None, are what comes out of the target's final norm.
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

    def of_request(self, req_to_token: Tensor, pool_row: int, places: np.ndarray) -> Tensor:
        """[k, size] of the tokens whose KV stands at ``places`` [k] of a row of ``req_to_token``."""
        return self.read(req_to_token[pool_row, torch.from_numpy(places)].long())

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


class HeadForward(CpuForward):
    """``ModelForward`` of a head. Its states are what its own next step takes in."""

    def __init__(self, model: LeanForward, req_to_token: Tensor, hidden: HiddenStates) -> None:
        super().__init__(model, req_to_token)
        self.target_states = hidden

    def run(self, batch: TreeBatch, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        return super().run(without_first(batch))

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        return super().search(without_first(first), search, keep)

    def _before(self, batch: TreeBatch) -> Before:
        """The target's, of the tokens before those of a text."""
        return Before(self.target_states.by_slot, token_slots(self._req_to_token, batch, back=1))

    def _before_level(self, states: Tensor, levels: Levels, step: int) -> Before:
        """Its own, of the parents of the beams of depth ``step`` - 1."""
        parents = levels.parents_of(step)
        by_row = states.view(len(parents), -1, states.shape[-1])
        taken = by_row.gather(1, parents[:, :, None].expand(-1, -1, states.shape[-1]))
        return Before(taken.flatten(0, 1))


def without_first(batch: TreeBatch) -> TreeBatch:
    """The batch without the first token of every text, which no key shows either. A head's gap begins with
    it."""
    if batch.gap is not None and batch.gap.start:
        raise ValueError(f"a head's gap begins at 0, not at {batch.gap.start}")
    left_out = np.zeros_like(batch.kv_lens) if batch.gap is None else batch.gap.length
    some = batch.places > 0
    first = np.where(left_out > 0, 0, np.minimum(batch.kv_lens, 1))
    return replace(
        batch,
        tokens=batch.tokens[some],
        positions=batch.positions[some],
        places=batch.places[some],
        q_lens=np.bincount(batch.row[some], minlength=len(batch.q_lens)),
        kv_lens=batch.kv_lens - first,
        seen=None if batch.seen is None else batch.seen[some],
        gap=Gap(0, left_out + first),
    )


def layers_to_capture(target: Any, head: Any) -> list[int]:
    """Layers of the target whose inputs the head reads, in ascending order: by the head's configuration, or
    those that SGLang takes by default. Raises ValueError."""
    if not hasattr(target, "set_eagle3_layers_to_capture"):
        raise ValueError(
            f"the draft is an EAGLE-3 head, and SGLang's {type(target).__name__} hands out no hidden states: "
            "serve a target of another architecture, or a draft model"
        )
    options = getattr(head.config, "eagle_config", None) or {}
    target.set_eagle3_layers_to_capture(options.get("eagle_aux_hidden_state_layer_ids"))
    target.capture_aux_hidden_states = False  # our forward keeps them itself
    layers = sorted(set(target.model.layers_to_capture))
    wanted, known = head.model.num_aux_hidden_states, target.config.num_hidden_layers
    if len(layers) != wanted or layers[0] < 0 or layers[-1] >= known:
        raise ValueError(
            f"the EAGLE-3 head reads {wanted} hidden states, and these layers of the target's {known} would "
            f"give them: {layers}. Serve the target that the head was trained for, or set "
            "eagle_config.eagle_aux_hidden_state_layer_ids in the head's config.json"
        )
    return layers


def hidden_states(target: Any, head: Any) -> HiddenStates:
    """What SGLang's model of a head reads of the ``ModelRunner`` ``target``. Raises ValueError."""
    if type(head).__name__ == MTP:
        require_same_sizes(target.model.config, head.config)
        return final_states(target, head.config.hidden_size)
    pool, layers = target.token_to_kv_pool.k_buffer[0], layers_to_capture(target.model, head)
    size, made = head.config.hidden_size, partial(project, head.model)
    return HiddenStates(pool.shape[0], size, pool.dtype, layers, made, pool.device)


def require_same_sizes(target: Any, layer: Any) -> None:
    """Raises ValueError where the configuration of an MTP layer is not that of its target: the kernels, which
    are given the target's matrices, do not check their sizes."""
    of_layer, of_target = ((c.hidden_size, c.vocab_size) for c in (layer, target))
    if of_layer != of_target:
        raise ValueError(
            "the MTP layer works with hidden states of {} numbers and {} tokens, and the target with {} and "
            "{}: serve the target whose checkpoint the layer is in".format(*of_layer, *of_target)
        )


def final_states(target: Any, size: int) -> HiddenStates:
    """What comes out of the final norm of the ``ModelRunner`` ``target``, ``size`` wide."""
    pool = target.token_to_kv_pool.k_buffer[0]
    return HiddenStates(pool.shape[0], size, pool.dtype, device=pool.device)


def lean_target(target: Any, who_needs: str) -> LeanModel:
    """Our forward of the target that the ``ModelRunner`` holds. Raises ValueError where there is none."""
    lean: LeanModel | None = getattr(target.model, LEAN_ATTRIBUTE, None)
    if lean is None:
        raise ValueError(
            f"{who_needs} AdaServe's own forward of the target on a CPU: serve a Llama or Qwen "
            "target that is not quantised, and not with --cpu-weights off"
        )
    return lean


@dataclass(frozen=True)
class _Kind:
    """``obstacle``: why our kernels don't compute what SGLang's class does, if they don't."""

    name: str
    obstacle: Callable[[Any], str | None]
    read: Callable[[Any], tuple[ModelWeights, ModelConfig]]


_KINDS = {
    EAGLE3: _Kind("EAGLE-3 head", head_obstacle, read_head),
    MTP: _Kind("MTP layer", mtp_obstacle, read_mtp),
}


def head_forward(target: Any, head: Any, storage: Storage) -> HeadForward:
    """The forward of the head that the ``ModelRunner`` ``head`` holds, which from now on is told the
    hidden states of ``target``. Raises ValueError with the reason where there can be none."""
    model = head.model
    kind = _KINDS[type(model).__name__]
    if (reason := kind.obstacle(model)) is not None:
        raise ValueError(f"this {kind.name} is not supported on a CPU: {reason}")
    read = lean_target(target, f"an {kind.name} needs")
    read.sink = hidden = hidden_states(target, model)
    grow_rotary_table(model)
    lean = LeanModel(*kind.read(model), storage)
    object.__setattr__(model, LEAN_ATTRIBUTE, lean)  # where better weights are put
    return HeadForward(LeanForward(lean, head.token_to_kv_pool), head.req_to_token_pool.req_to_token, hidden)

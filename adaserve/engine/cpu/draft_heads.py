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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adaserve.checkpoints.draft_kind import EAGLE3, MTP
from adaserve.engine.beam_levels import Levels
from adaserve.engine.cpu.extract import read_head, read_mtp
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE, grow_rotary_table, llama_of
from adaserve.engine.cpu.kernel_support import head_obstacle, mtp_obstacle
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.params import Before, ModelConfig, ModelWeights
from adaserve.engine.device import KeepGoing, Ready, Search
from adaserve.engine.hidden_states import HiddenStates, hidden_states
from adaserve.engine.trees.attention import token_slots
from adaserve.engine.trees.batch import TreeBatch, without_first
from adaserve.errors import UnsupportedError


class HeadForward(CpuForward):
    """``ModelForward`` of a head. Its states are the input of its own next step."""

    def __init__(self, model: LlamaForward, req_to_token: Tensor, hidden: HiddenStates) -> None:
        super().__init__(model, req_to_token)
        self.target_states = hidden

    def run(self, batch: TreeBatch) -> Tensor:
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


def llama_target(target: Any, who_needs: str) -> LlamaModel:
    """Our forward of the target in the ``ModelRunner``. Raises UnsupportedError where there is none."""
    llama = llama_of(target.model)
    if llama is None:
        raise UnsupportedError(
            f"{who_needs} AdaServe's own forward of the target on a CPU: serve a Llama or Qwen "
            "target that is not quantized, and not with --cpu-weights off"
        )
    return llama


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
    """The forward of the head in the ``ModelRunner`` ``head``, which from now on gets the hidden states of
    ``target``. Raises UnsupportedError with the reason if the head is not supported."""
    model = head.model
    kind = _KINDS[type(model).__name__]
    if (reason := kind.obstacle(model)) is not None:
        raise UnsupportedError(f"this {kind.name} is not supported on a CPU: {reason}")
    read = llama_target(target, f"an {kind.name} needs")
    read.sink = hidden = hidden_states(target, model)
    grow_rotary_table(model)
    llama = LlamaModel(*kind.read(model), storage)
    object.__setattr__(model, LLAMA_ATTRIBUTE, llama)  # where better weights are put
    return HeadForward(
        LlamaForward(llama, head.token_to_kv_pool), head.req_to_token_pool.req_to_token, hidden
    )

"""Heads on a GPU: SGLang's own class, its steps and the hidden states that they read in one graph.

Books and the layout of the KV are those of CPU hosts (``engine.cpu.draft_heads``). The
target writes hidden states in the forward that writes its KV, so they come out of a verification's graph
without being asked for. The first step of a search reads all tokens that were accepted since the last one,
whose states are known by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from adaserve.checkpoints.draft_kind import MTP
from adaserve.config import AdaServeConfig
from adaserve.engine.beam_levels import Levels
from adaserve.engine.cpu.install import llama_of
from adaserve.engine.device import KeepGoing, Ready, Search
from adaserve.engine.gpu.attention import TreeKernel
from adaserve.engine.gpu.beam_search import BeamSearches
from adaserve.engine.gpu.forward import GpuForward, Packed
from adaserve.engine.gpu.model import Inputs, Output, Parts, SGLangCall
from adaserve.engine.gpu.sizes import Key
from adaserve.engine.hidden_states import HiddenStates, hidden_states
from adaserve.engine.trees.batch import TreeBatch, without_first
from adaserve.errors import UnsupportedError


@dataclass(frozen=True)
class _SpecInfo:
    """Where SGLang's heads look for hidden states."""

    hidden_states: Tensor


class SGLangHead(SGLangCall):
    """Calls the head that a ``ModelRunner`` holds; computes logits of the wanted tokens alone."""

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        runner, model, wanted = self._runner, self._runner.model, inputs.wanted
        assert inputs.before is not None
        spec_info = _SpecInfo(inputs.before.to(runner.dtype))
        with self._around(inputs, rows, kernel, spec_info) as batch:
            hidden, states = self._states(model, inputs, batch)
            hidden = hidden[wanted]
            room = None if inputs.room is None else inputs.room[: len(hidden)]
            # Of all that are given.
            metadata = LogitsMetadata(ForwardMode.TARGET_VERIFY, next_token_logits_buffer=room)
            output = model.logits_processor(inputs.tokens, hidden, model.lm_head, metadata)
        return Output(output.next_token_logits, states[wanted])

    def _states(self, model: Any, inputs: Inputs, batch: Any) -> tuple[Tensor, Tensor]:
        """[T, H] each: the inputs of the LM head and of the next step."""
        hidden, (states,) = model.model(inputs.tokens, inputs.positions, batch)
        return hidden, states


class SGLangMTP(SGLangHead):
    """The same of an MTP layer, which reads the token at SGLang's position 0, the second one of a text,
    without its embedding. SGLang's positions of a head are one less than ours; padding stands at 0."""

    def _states(self, model: Any, inputs: Inputs, batch: Any) -> tuple[Tensor, Tensor]:
        hidden = model.model(inputs.tokens, (inputs.positions - 1).clamp(min=0), batch)
        return hidden, hidden


class HeadSearches(BeamSearches):
    """Beam searches whose beams carry the head's own hidden states."""

    def __init__(self, parts: Parts, hidden: HiddenStates) -> None:
        super().__init__(parts)
        self._hidden = hidden

    def _before(self, there: Mapping[str, Tensor], places: Tensor) -> Tensor:
        """The target's, of the tokens before those of the first step."""
        return self._hidden.read(self._parts.slots(there["pool_rows"][:, None], places - 1))

    def _before_level(self, states: Tensor | None, levels: Levels, step: int) -> Tensor:
        """Its own, of the parents of the beams."""
        assert states is not None
        parents = levels.parents_of(step)
        return states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[-1]))


class GpuHead(GpuForward):
    """``ModelForward`` of a head. When it reads a text it only writes KV, because its logits are not
    needed."""

    def __init__(self, parts: Parts, hidden: HiddenStates) -> None:
        super().__init__(parts)
        self.hidden, self._searches = hidden, HeadSearches(parts, hidden)

    def feed(self, batch: TreeBatch) -> None:
        batch = without_first(batch)
        if len(batch):
            self._queue(batch)

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        return super().search(without_first(first), search, keep)

    def _forward(self, key: Key, kernel: TreeKernel, packed: Packed) -> None:
        before = self.hidden.read(self.parts.slots(packed.pool_rows, packed.places - 1))
        slots = self.parts.slots(packed.pool_rows, packed.places)
        inputs = Inputs(packed.tokens, packed.positions, slots, slice(0), before)
        self._call(key, kernel, packed, inputs)


def hidden_states_of(target: Any, head: Any) -> HiddenStates:
    """What the head of the ``ModelRunner`` ``head`` reads of ``target``, which from now on writes it. Raises
    UnsupportedError with the reason where there can be none."""
    model = head.model
    if type(model).__name__ != MTP:
        _refuse_unsupported(model)
    hidden = hidden_states(target, model)
    keep_states(target, hidden)
    return hidden


def keep_states(target: Any, hidden: HiddenStates) -> None:
    """From now on the ``ModelRunner`` ``target`` writes its states to ``hidden``. Raises UnsupportedError."""
    inner = getattr(target.model, "model", None)
    if inner is None:  # as in Gemma 3's class for images
        raise UnsupportedError(
            f"heads read the target's hidden states, which SGLang's {type(target.model).__name__} computes "
            "in a model inside of it: serve a target of another architecture, or a draft model"
        )
    if (llama := llama_of(target.model)) is not None:  # a GPU's parts on a CPU
        llama.sink = hidden
        return
    forward = inner.forward

    def writing(input_ids: Tensor, positions: Tensor, forward_batch: Any, *more: Any, **named: Any) -> Tensor:
        made = forward(input_ids, positions, forward_batch, *more, **named)
        # Alone where no layer's input was asked for.
        states, captured = (made, None) if isinstance(made, Tensor) else made
        packed = states if captured is None else pack_aux_hidden_states(captured)
        hidden.write(forward_batch.out_cache_loc, packed, states)
        return states

    inner.forward = writing


def _refuse_unsupported(model: Any) -> None:
    """Raises UnsupportedError for an EAGLE-3 head that is not covered."""
    if model.model.is_mrope_enabled:
        raise UnsupportedError("this EAGLE-3 head is not supported: multimodal rotary embedding")
    if model.model.hidden_size_in != model.config.hidden_size:
        raise UnsupportedError(
            "this EAGLE-3 head is not supported on a GPU: its hidden size is not the target's"
        )


def gpu_head(parts: Parts, target: Any, head: Any, config: AdaServeConfig) -> GpuHead:
    """The forward of the head that the ``ModelRunner`` ``head`` holds; ``parts``: as a draft model's.

    The first step has room for all that its own tree can have had accepted. Raises UnsupportedError."""
    call = SGLangMTP(head) if type(head.model).__name__ == MTP else SGLangHead(head)
    # What it reads first are all tokens that were accepted, and only the device knows how many these are.
    own = replace(parts, call=call, first=1 + config.max_depth, follows=False)
    return GpuHead(own, hidden_states_of(target, head))

"""A tiny target and its head as a device's parts see them, over the pools of a host's test."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from adaserve.engine import cpu
from adaserve.engine.cpu.forwards import LlamaForward
from adaserve.engine.cpu.params import Before
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TreeKernel
from adaserve.engine.gpu.device import GpuDevice
from adaserve.engine.gpu.draft_heads import GpuHead
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.model import Inputs, Output, Parts
from adaserve.engine.gpu.sizes import Sizes, Tiers
from tests.engine.cpu.test_draft_heads import Setting
from tests.engine.gpu.factories import CPU
from tests.engine.heads import Head
from tests.engine.mtp import Mtp

SIZES = Sizes(
    Tiers((1, 2, 4)), Tiers((1, 2, 4, 8, 16, 32, 64)), most_rows=4, most_tokens=64, depth=4, widths=(4,) * 3
)


class TinyCall:
    """A ``ModelCall`` of a host's model; ``words``: the tokens that a head knows."""

    def __init__(self, forward: LlamaForward, words: Tensor | None = None) -> None:
        self._forward, self._words = forward, words

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        assert isinstance(kernel, SdpaKernel)
        plan, before = kernel.tree_plan, None if inputs.before is None else Before(inputs.before)
        states = self._forward.hidden(cpu.Inputs(inputs.tokens, inputs.positions, inputs.slots, plan, before))
        wanted = states[inputs.wanted]
        logits = self._forward.logits(wanted) if len(wanted) else torch.empty(0, 1)
        return Output(logits if self._words is None else logits[:, self._words], wanted)


def headed_device(made: Setting, head: Head | Mtp, depth: int) -> GpuDevice:
    """Over the target, the head and the hidden states of ``made``."""
    buffers = AttentionBuffers.allocate(1 << 12, 1 << 14, CPU)
    buffers.kv_indices.fill_(7)
    known = Parts(
        TinyCall(made.reads),
        lambda b, rows, place: SdpaKernel(b),
        GraphTable(capture=False),
        buffers,
        dataclasses.replace(SIZES, captured=frozenset(SIZES.verifications())),
        made.drafts._req_to_token,
        candidates=4,
        last_position=1 << 10,
        last_token=head.config.vocab_size - 1,
    )
    own = dataclasses.replace(
        known,
        call=TinyCall(made.drafts.model, head.token_ids),  # type: ignore[arg-type]
        table=GraphTable(capture=False),
        sizes=dataclasses.replace(SIZES, captured=frozenset(SIZES.drafts())),
        first=1 + depth,
        words=head.token_ids,
    )
    return GpuDevice(GpuForward(known), GpuHead(own, made.states), target_states=made.states)

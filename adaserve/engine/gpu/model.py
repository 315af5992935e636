"""A model on a GPU, as the forwards that share it see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from torch import Tensor

from adaserve.engine.device import Run
from adaserve.engine.device_timing import mark
from adaserve.engine.gpu.attention import (
    AttentionBuffers,
    MakeKernel,
    TreeAttentionBackend,
    TreeKernel,
)
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.sizes import FIRST, Key, SearchKey, Sizes
from adaserve.engine.rotary_shift import RotaryShift
from adaserve.engine.trees.shape import TreeShape
from adaserve.engine.trees.verify import SCRATCH_SLOT
from adaserve.scheduler.config import NARROW


@dataclass(frozen=True)
class Inputs:
    """Tokens of one forward."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: where their KV goes
    wanted: slice = field(default_factory=partial(slice, None))  # tokens whose logits are needed
    before: Tensor | None = None  # [T, H]: what a head is given besides, hidden states of the tokens before
    room: Tensor | None = None  # fp32 [w or more, vocab]: where a model may leave logits
    turned: Tensor | None = None  # int64 [T]: rotary positions, where they are others (M-RoPE)
    pieces: Tensor | None = None
    """int64 [w]: how many tokens each piece has, where the logits of the last ones alone are needed."""


class LogitsRoom:
    """Where a model's forwards leave their logits, one after the other: if each graph had a place of its own,
    16 sizes with 128k tokens would take a gigabyte."""

    def __init__(self, most: int, words: int, device: torch.device) -> None:
        self._shape, self._device = (most, words), device
        self._rows: Tensor | None = None

    def rows(self, tokens: int) -> Tensor | None:
        """fp32 [tokens, words]; None where there is no room for so many."""
        if tokens > self._shape[0]:
            return None
        if self._rows is None:
            self._rows = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return self._rows[:tokens]

    def keep(self, logits: Tensor) -> Tensor:
        """``logits`` [T, vocab] in there, where the model may have left them. Without room for them, as they
        are."""
        rows = self.rows(len(logits))
        if rows is None or rows.shape != logits.shape or rows.data_ptr() == logits.data_ptr():
            return logits
        return rows.copy_(logits)


@dataclass(frozen=True)
class Output:
    """Of the w tokens that are wanted."""

    logits: Tensor  # [w, vocab]
    states: Tensor | None = None  # [w, H]: what a head's next step takes in


class ModelCall(Protocol):
    """Runs a model on static inputs: SGLang's models, its heads, and tiny ones in tests."""

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        """The KV of ``inputs`` goes to ``inputs.slots``."""
        ...


class SGLangCall:
    """Calls the model that a ``ModelRunner`` holds, without its per-forward bookkeeping."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._backend = TreeAttentionBackend(runner)
        # SGLang wants a row of the request pool and a length of each request. Neither is read, so both are
        # views of one number, which no kernel has to fill.
        self._unread = torch.ones(1, dtype=torch.int64, device=runner.device)

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        with self._around(inputs, rows, kernel) as batch:
            output = self._runner.model.forward(inputs.tokens, batch.positions, batch)
        return Output(output.next_token_logits[inputs.wanted])

    @contextmanager
    def _around(
        self, inputs: Inputs, rows: int, kernel: TreeKernel, spec_info: Any = None
    ) -> Iterator[ForwardBatch]:
        """What SGLang's models are called with, and what they find around them."""
        runner, unread, positions = self._runner, self._unread.expand(rows), inputs.positions
        self._backend.kernel, self._backend.positions = kernel, positions
        if self._backend.slides:
            positions = positions.clone()  # to which Gemma 3 adds 1, in place
        batch = ForwardBatch(
            # The modes that give logits of every token, and of the last one of each request.
            forward_mode=ForwardMode.TARGET_VERIFY if inputs.pieces is None else ForwardMode.EXTEND,
            extend_seq_lens=inputs.pieces,
            batch_size=rows,
            input_ids=inputs.tokens,
            req_pool_indices=unread,
            seq_lens=unread,
            seq_lens_cpu=torch.ones(rows, dtype=torch.int64),
            seq_lens_sum=rows,
            out_cache_loc=inputs.slots,
            positions=positions,
            spec_info=spec_info,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            next_token_logits_buffer=inputs.room,
            return_hidden_states_before_norm=False,
        )
        if inputs.turned is not None:
            batch.mrope_positions = inputs.turned.repeat(3, 1)
        context = ForwardContext(attn_backend=self._backend)
        with (
            torch.no_grad(),
            get_model().override(shared_experts=runner.model.shared_experts_config),
            forward_context(context, forward_batch=batch),
        ):
            yield batch


def known_tokens(model: Any, device: torch.device) -> Tensor | None:
    """int64 [V]: the tokens of the logits, for a draft that knows only some; None = all, in order."""
    ids = getattr(model, "hot_token_id", None)
    return None if ids is None else ids.to(device=device, dtype=torch.int64)


@dataclass(frozen=True)
class Parts:
    """What all forwards of one model work with.

    ``candidates``: how many best tokens a draft step needs, at most. ``last_position``: the highest with a
    rotary angle; tokens beyond it are never kept, so they may compute anything. ``last_token``: the last row
    of the embedding; a target with more of them only pads further, but its padding must not be looked up.
    ``first``: tokens per request that the first step of a search has room for. ``follows``: as in
    ``ModelForward``. ``words``: as ``known_tokens``.
    """

    call: ModelCall
    make_kernel: MakeKernel
    table: GraphTable
    buffers: AttentionBuffers
    sizes: Sizes
    req_to_token: Tensor
    candidates: int
    last_position: int
    last_token: int
    first: int = FIRST
    follows: bool = False
    shift: RotaryShift | None = None  # None = no M-RoPE
    words: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.buffers.mask.device

    @cached_property
    def logits(self) -> LogitsRoom:
        """With room for what has a graph."""
        captured = self.sizes.captured
        most = [
            (k.pieces or k.tokens) if isinstance(k, Key) else k.rows * max(self.first, *k.beams)
            for k in captured
        ]
        words = self.last_token + 1 if self.words is None else len(self.words)
        return LogitsRoom(max(most, default=0), words, self.device)

    def best(self, shape: TreeShape) -> int:
        """How many best tokens each step of a search looks for. Kernels are compiled for two such numbers."""
        return NARROW if shape.children <= NARROW else self.candidates

    def slots(self, pool_rows: Tensor, places: Tensor) -> Tensor:
        """int64: where the KV of tokens goes; places below 0 are padding's."""
        return torch.where(places < 0, SCRATCH_SLOT, self.req_to_token[pool_rows, places]).long()

    def turned(self, positions: Tensor, pool_rows: Tensor) -> Tensor:
        """int64: rotary positions of tokens, those of padding included."""
        if self.shift is not None:
            positions = positions + self.shift.by_row[pool_rows]
        return positions.clamp(min=0, max=self.last_position)

    def run(self, key: Key | SearchKey, function: Callable[[], Any]) -> tuple[Any, Run]:
        """``function``, or its graph where ``key`` has one; its output is valid until the key's next run."""
        run = self.table.get(key, function).replay if key in self.sizes.captured else function
        start = mark(self.device)
        output = run()
        return output, (start, mark(self.device))

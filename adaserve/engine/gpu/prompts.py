"""Short prompts: each prefill one graph.

SGLang captures a prefill piece by piece, since the host calls the attention of every layer. On an H200 a
prompt of any length then took the target 14 to 25 ms, and a draft another 12 to 15. A verification of as many
tokens takes 5 to 12. So prompts that fit into a graph of ours are read there, and the others by SGLang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import EagerRunner
from torch import Tensor

from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.model import Parts
from adaserve.engine.gpu.sizes import Key, Tiers
from adaserve.engine.requests import rows_of_pool
from adaserve.engine.trees.batch import TreeBatch

MIN_TOKENS, MAX_TOKENS = 16, 512
"""Of a graph."""

MIN_EACH = 8
"""Tokens of each text, on average, in a full graph. Attention has room for the tiles of every text, and the
more of it stands empty, the fewer parts long contexts are cut into."""


class PromptForward(GpuForward):
    """Reads texts: causal forwards that give the logits of each text's last token."""

    def __init__(self, parts: Parts) -> None:
        """``parts``: of the same model's other forwards."""
        tokens = Tiers(tuple(t for t in Tiers.up_to(MAX_TOKENS).sizes if t >= MIN_TOKENS))
        self.keys = [prompt_key(t) for t in reversed(tokens.sizes)]
        sizes = replace(parts.sizes, tokens=tokens, captured=frozenset(self.keys))
        super().__init__(replace(parts, sizes=sizes, table=GraphTable(parts.table.capture)))

    def fits(self, tokens: int, texts: int) -> bool:
        """Whether there is a graph for so many. Where memory was short, nothing is compiled for them."""
        key = self._fitting(tokens, texts)
        return key in self.sizes.captured and self.table.has(key)

    def _fitting(self, tokens: int, texts: int) -> Key:
        return prompt_key(self.sizes.tokens.fit(max(tokens, MIN_EACH * texts)))

    def _key(self, batch: TreeBatch) -> Key:
        return self._fitting(len(batch), len(batch.q_lens))

    def capture(self, key: Key) -> None:  # type: ignore[override]
        """The kernel is chosen for one text that takes all of it."""
        one = key.tokens * (np.arange(key.rows) == 0)
        self._run_padding(key, one, one)
        self.take_runs()  # or the first text that a draft reads here would take as long

    def read(self, batch: TreeBatch) -> Tensor:
        """fp32 [n, vocab], valid until the next one."""
        key = self._key(batch)
        logits: Tensor = self._replay(key, self._extent(key, batch), batch, batch.q_lens)[0]
        return logits[: len(batch.q_lens)]


def prompt_key(tokens: int) -> Key:
    """Each token sees what comes before it in its text, so windows are as wide as all of them. One request
    more holds the padding. ``tokens``: a multiple of 8."""
    rows = tokens // MIN_EACH + 1
    return Key(tokens, rows, tokens, pieces=rows)


class PrefillRunner(Protocol):
    """SGLang's runner of prefill graphs, as a ``ModelRunner`` calls it."""

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool: ...

    def execute(self, forward_batch: ForwardBatch, **kwargs: Any) -> Any: ...


class ShortPrompts:
    """``PrefillRunner`` that reads short prompts in one graph each, has nothing left to do for those that a
    verification has read, and leaves the others to SGLang's."""

    def __init__(self, model: GpuForward, reader: PromptForward, otherwise: PrefillRunner | None) -> None:
        self._model, self._reader, self._otherwise = model, reader, otherwise

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        if self._was_read(forward_batch) or self._fits(forward_batch):
            return True
        return self._otherwise is not None and self._otherwise.can_run_graph(forward_batch)

    def execute(self, forward_batch: ForwardBatch, **kwargs: Any) -> Any:
        if self._was_read(forward_batch):
            logits = self._model.take_read(forward_batch.batch_size)
        elif self._fits(forward_batch):
            logits = self._reader.read(batch_of(forward_batch)).clone()  # samplers write to it
            self._reader.take_runs()  # of prefills nobody asks
        else:
            assert self._otherwise is not None
            return self._otherwise.execute(forward_batch, **kwargs)
        return LogitsProcessorOutput(next_token_logits=logits)

    def _fits(self, batch: ForwardBatch) -> bool:
        if batch.req_pool_indices_cpu is None or not wants_last_logits(batch):
            return False
        return self._reader.fits(len(batch.input_ids), batch.batch_size)

    def _was_read(self, batch: ForwardBatch) -> bool:
        return self._model.prompt_logits is not None and wants_last_logits(batch)


def wants_last_logits(batch: ForwardBatch) -> bool:
    """Whether a forward is a prefill of tokens, of which nothing is asked but the logits of each last one."""
    if batch.forward_mode != ForwardMode.EXTEND or batch.contains_mm_inputs():
        return False
    of_embeds = batch.input_embeds is not None or batch.replace_embeds is not None
    wants_states = batch.capture_hidden_mode not in (None, CaptureHiddenMode.NULL)
    return not (of_embeds or wants_states or asks_for_prompt_logprobs(batch))


def asks_for_prompt_logprobs(batch: ForwardBatch) -> bool:
    """Those of the answer come from the last logits."""
    if not batch.return_logprob:
        return False
    lens, starts = batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu
    return any(start < length for length, start in zip(lens, starts, strict=True))


def batch_of(batch: ForwardBatch) -> TreeBatch:
    """The texts of a prefill, whose tokens are on the device alone."""
    starts, q_lens = np.array([batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu], np.int64)
    blank = np.zeros(len(batch.input_ids), np.int64)
    return replace(TreeBatch.causal(blank, rows_of_pool(batch), starts, q_lens), drawn=batch.input_ids)


def take_short_prompts(runner: Any, forward: GpuForward) -> PromptForward:
    """From now on what is returned reads short prompts for the ``ModelRunner``, and texts that ``forward`` of
    the same model is fed."""
    reader, before = PromptForward(forward.parts), runner.prefill_cuda_graph_runner
    otherwise = None if isinstance(before, EagerRunner) else before
    runner.prefill_cuda_graph_runner, forward.reader = ShortPrompts(forward, reader, otherwise), reader
    return reader

"""Log-probabilities of what was emitted, by SGLang's own function, for some of the requests at a time: all at
once it would make several tensors of emitted tokens x vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from torch import Tensor

from adaserve.engine.logits.portions import portions

ASKED_TOKENS = "next_token_token_ids_logprobs_idx"
LISTS = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val",
         ASKED_TOKENS)  # fmt: skip
"""What SGLang tells of each emitted token where any request of its batch has asked: tensors, but the tokens
that a client has named."""


def tell(batch: Any, output: LogitsProcessorOutput, draws: Tensor, index: Tensor) -> None:
    """Writes to ``output`` what SGLang's ``batch`` has asked for, from its logits [T, vocab].

    ``draws``: int64 [T]; ``index``: int64 [n, stride], the verified token that drew each emitted one."""
    logits = output.next_token_logits
    told = []
    for part in portions(len(index), index.shape[1] * logits.shape[1]):
        some = LogitsProcessorOutput(next_token_logits=logits)
        compute_spec_logprobs(_of_batch(batch, part), some, draws, accept_index=index[part])
        told.append((some, index[part].numel()))
    output.next_token_logprobs = torch.cat([some.next_token_logprobs for some, _ in told])
    for name in LISTS:
        found = [(getattr(some, name), count) for some, count in told]
        if any(values is not None for values, _ in found):
            nothing = [] if name == ASKED_TOKENS else logits.new_empty(0)
            joined = [value for values, count in found for value in values or [nothing] * count]
            setattr(output, name, joined)


def _of_batch(batch: Any, part: slice) -> Any:
    """What log-probabilities need of some of the batch's requests."""
    info = batch.sampling_info
    return SimpleNamespace(
        seq_lens=batch.seq_lens[part],
        sampling_info=SimpleNamespace(is_all_greedy=info.is_all_greedy, temperatures=info.temperatures[part]),
        top_logprobs_nums=(batch.top_logprobs_nums or [])[part],
        token_ids_logprobs=(batch.token_ids_logprobs or [])[part],
    )

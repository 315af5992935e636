"""Short prompts in one forward each, against those of a host, and what is left to SGLang."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.gpu.device import largest_forward
from adaserve.engine.gpu.graphs import EagerGraph
from adaserve.engine.gpu.prompts import MAX_TOKENS, MIN_EACH, PromptForward, ShortPrompts
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import SIZES, Requests, TinyModel, device_forward

Texts = tuple[list[int], list[int]]
"""Cached tokens of each request, and of these, those that were cached before."""

CASES: list[Texts] = [
    ([17], [0]),
    ([1], [0]),
    ([30, 9, 1], [0, 0, 0]),
    ([40, 33, 12], [39, 8, 0]),
    ([90, 2], [5, 1]),
    ([60] * 8, [0] * 8),  # 480 tokens, of 512
]


def batch_of(requests: Requests, starts: list[int]) -> TreeBatch:
    texts = [requests.text(r)[start:] for r, start in enumerate(starts)]
    q_lens = np.array([len(text) for text in texts])
    return TreeBatch.causal(np.concatenate(texts), requests.pool_rows, np.array(starts), q_lens)


@pytest.mark.parametrize("texts", CASES)
def test_logits_and_cache_are_the_hosts(texts: Texts) -> None:
    lengths, starts = texts
    requests = Requests(lengths)
    models = [TinyModel(requests.slots), TinyModel(requests.slots)]
    for model in models:
        requests.prefill(model, starts)
    batch, host = batch_of(requests, starts), CpuForward(models[0], requests.req_to_token)
    right = host.logits(host.run(batch))[batch.q_lens.cumsum() - 1]
    reader = PromptForward(device_forward(requests, models[1], []).parts)
    reader.read(batch_of(requests, [0] * len(starts)))  # what is left of an earlier forward must not matter
    got = reader.read(batch)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    for one, two in zip(models[0].k + models[0].v, models[1].k + models[1].v, strict=True):
        torch.testing.assert_close(one[1:], two[1:], rtol=1e-4, atol=1e-4)


def test_every_size_has_room() -> None:
    requests = Requests([5])
    reader = PromptForward(device_forward(requests, TinyModel(requests.slots), []).parts)
    for tokens in range(1, MAX_TOKENS + 1):
        for texts in {1, min(2, tokens), min(tokens, MAX_TOKENS // MIN_EACH)}:
            assert reader.fits(tokens, texts)
            q_lens = np.array([tokens - texts + 1, *[1] * (texts - 1)])
            rows = np.ones(texts, np.int64)
            key = reader._key(TreeBatch.causal(np.zeros(tokens, np.int64), rows, 0 * rows, q_lens))
            assert key in reader.keys and key.tokens >= tokens and key.rows > texts
            assert key.columns >= q_lens.max() and key.columns % 8 == 0
    assert not reader.fits(MAX_TOKENS + 1, 1) and not reader.fits(100, MAX_TOKENS // MIN_EACH + 1)


@pytest.mark.parametrize("most_rows", [1, 8, 200])
def test_workspaces_are_made_for_them(most_rows: int) -> None:
    """FlashInfer's, by the most requests and tokens; few may be served."""
    requests, sizes = Requests([5]), replace(SIZES, most_rows=most_rows, most_tokens=512)
    rows, tokens = largest_forward(sizes, most_rows + 1)
    keys = PromptForward(device_forward(requests, TinyModel(requests.slots), []).parts).keys
    assert all(key.rows <= rows and key.tokens <= tokens for key in (*keys, *sizes.verifications()))
    assert rows > most_rows


def test_a_draft_that_has_missed_much_reads_it_there() -> None:
    requests = Requests([90])
    model = TinyModel(requests.slots)
    draft = device_forward(requests, model, SIZES.drafts())
    draft.reader = reader = PromptForward(draft.parts)
    reader.capture(reader.keys[0])
    model.written.clear()
    for start, tables in ((88, (1, 1)), (50, (2, 1)), (20, (2, 2))):
        draft.feed(batch_of(requests, [start]))
        assert (len(draft.table), len(reader.table)) == tables
        assert len(draft.take_runs()) == 1, "what it takes is not counted, or twice"
    assert [len(slots) for slots in model.written] == [2, 64, 96]  # windows of 64 have graphs of the draft's


def test_sizes_without_a_graph_are_not_read_there() -> None:
    """Memory was short when graphs were captured. A draft's own attention is compiled for them instead."""
    requests = Requests([90])
    model = TinyModel(requests.slots)
    draft = device_forward(requests, model, [])
    draft.sizes = replace(draft.sizes, columns=8)
    draft.reader = reader = PromptForward(draft.parts)
    draft.compile_reading()
    assert not model.written, "graphs compile theirs"
    reader.table.capture = True
    reader.table._graphs = {key: EagerGraph(str) for key in reader.keys if key.tokens in (512, 32)}
    assert [n for n in (1, 16, 24, 25, 32, 33, 384, 385, 512) if reader.fits(n, 1)] == [25, 32, 385, 512]
    draft.compile_reading()
    assert [len(slots) for slots in model.written] == [16, 64]


class Otherwise:
    """SGLang's runner."""

    def __init__(self, can: bool) -> None:
        self.can, self.ran = can, 0

    def can_run_graph(self, forward_batch: Any) -> bool:
        return self.can

    def execute(self, forward_batch: Any, **kwargs: Any) -> str:
        self.ran += 1
        return "sglang"


def forward_batch(requests: Requests, lengths: list[int], starts: list[int], **other: Any) -> Any:
    texts = [
        requests.text(r)[start:length] for r, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    plain: dict[str, Any] = {
        "forward_mode": ForwardMode.EXTEND, "batch_size": len(texts), "return_logprob": False,
        "input_ids": torch.tensor([t for text in texts for t in text]), "input_embeds": None,
        "replace_embeds": None, "capture_hidden_mode": CaptureHiddenMode.NULL,
        "req_pool_indices_cpu": torch.from_numpy(requests.pool_rows), "extend_prefix_lens_cpu": starts,
        "extend_seq_lens_cpu": [len(text) for text in texts], "extend_logprob_start_lens_cpu": starts,
        "contains_mm_inputs": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**plain | other)


def short_prompts(requests: Requests, otherwise: Otherwise | None) -> ShortPrompts:
    model = device_forward(requests, TinyModel(requests.slots), [])
    return ShortPrompts(model, PromptForward(model.parts), otherwise)


def test_first_tokens_come_of_the_tokens_on_the_device() -> None:
    requests, otherwise = Requests([40, 12]), Otherwise(True)
    prompts, batch = short_prompts(requests, otherwise), forward_batch(requests, [40, 12], [0, 0])
    assert prompts.can_run_graph(batch)
    got = prompts.execute(batch).next_token_logits
    host = CpuForward(TinyModel(requests.slots), requests.req_to_token)
    right = host.logits(host.run(batch_of(requests, [0, 0])))[[39, 51]]
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    before = got.clone()
    prompts.execute(forward_batch(requests, [7, 5], [0, 0]))
    assert torch.equal(got, before), "a sampler's logits were overwritten by the next prefill"
    assert not otherwise.ran


LEFT: dict[str, dict[str, Any]] = {
    "a verification": {"forward_mode": ForwardMode.TARGET_VERIFY},
    "prompts beside decoding": {"forward_mode": ForwardMode.MIXED},
    "many tokens": {"input_ids": torch.zeros(MAX_TOKENS + 1)},
    "many prompts": {"batch_size": MAX_TOKENS // MIN_EACH + 1},
    "embeddings": {"input_embeds": torch.zeros(1)},
    "embeddings of some tokens": {"replace_embeds": torch.zeros(1)},
    "hidden states": {"capture_hidden_mode": CaptureHiddenMode.FULL},
    "log-probabilities": {"return_logprob": True, "extend_logprob_start_lens_cpu": [0, 11]},
    "images": {"contains_mm_inputs": lambda: True},
    "rows that only the device knows": {"req_pool_indices_cpu": None},
}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("can", [True, False])
def test_what_is_left_to_sglang(what: str, can: bool) -> None:
    requests, otherwise = Requests([40, 12]), Otherwise(can)
    prompts = short_prompts(requests, otherwise)
    batch = forward_batch(requests, [40, 12], [0, 0], **LEFT[what])
    assert prompts.can_run_graph(batch) is can
    if can:
        assert prompts.execute(batch) == "sglang" and otherwise.ran == 1
    assert not short_prompts(requests, None).can_run_graph(batch), "without its graphs, its eager forward"


def test_log_probabilities_of_answers_need_no_more() -> None:
    requests = Requests([40, 12])
    lens = {"return_logprob": True, "extend_logprob_start_lens_cpu": [40, 12]}
    assert short_prompts(requests, None).can_run_graph(forward_batch(requests, [40, 12], [0, 0], **lens))

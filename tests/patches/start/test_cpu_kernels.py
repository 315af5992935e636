"""What a CPU host does in place of a GPU's kernels and copies (patches/start/cpu_kernels.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from adaserve.patches.start.cpu_kernels import (
    _without_name,
    add_gated_expert,
    assign_req_to_token,
    cap_logits,
)


def test_slots_are_written_behind_those_that_a_request_has() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([4, 5])
    assign_req_to_token(rows, table, start, end, torch.tensor([11, 12, 13, 21, 22]), 2)
    assert table.tolist() == [[0, 0, 0, 21, 22, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]


def test_a_shared_expert_is_added_as_strongly_as_its_gate_says() -> None:
    """Of a Qwen 2 model with experts, which no CPU could serve otherwise."""
    torch.manual_seed(0)
    read, expert, sums = torch.randn(3, 3, 8).bfloat16()
    weight, before = torch.randn(8).bfloat16(), sums.float()
    strength = torch.sigmoid((read.float() * weight.float()).sum(1, keepdim=True))
    add_gated_expert(read, weight, expert, sums)
    assert sums.dtype == torch.bfloat16
    torch.testing.assert_close(sums.float(), before + strength * expert.float(), rtol=1e-2, atol=1e-2)


def test_logits_are_capped_in_place() -> None:
    logits = torch.tensor([[-100.0, 0.0, 0.5, 30.0]])
    right = [[30 * math.tanh(x / 30) for x in logits[0].tolist()]]
    assert cap_logits(logits, 30.0) is logits
    torch.testing.assert_close(logits, torch.tensor(right))


def test_a_result_is_handed_on_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(torch.profiler.record_function, "__enter__", lambda self: names.append(self.name))
    monkeypatch.setattr(torch.profiler.record_function, "__exit__", lambda *_: None)
    recorded: list[bool] = []
    result = GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=torch.tensor([5])
    )
    result.copy_done = SimpleNamespace(record=lambda: recorded.append(True))
    _without_name(GenerationBatchResult.copy_to_cpu, result, return_logprob=False)
    assert (names, recorded, result.next_token_ids.tolist()) == ([], [True], [5])
    result.copy_to_cpu(return_logprob=False)
    assert names, "SGLang names the copy no more: the hook can go"

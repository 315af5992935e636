"""SGLang's repetition penalty, without a compiler."""

from __future__ import annotations

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from adaserve.patches.scheduler.repetition_penalties import operator_by_operator


def test_nothing_is_compiled() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0]])
    with torch.compiler.set_stance("fail_on_recompile"):
        operator_by_operator(apply_scaling_penalties, logits, torch.tensor([[2.0, 2.0, 1.0]]))
    assert logits.tolist() == [[0.5, -4.0, 3.0]]

"""SGLang's sampler before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler

from adaserve.engine.gpu import first_tokens
from adaserve.errors import UnsupportedError

CPU = torch.device("cpu")


def test_what_a_first_request_would_wait_for_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def sampling(probabilities: torch.Tensor, *_: Any, **named: Any) -> None:
        ran.append((tuple(probabilities.shape), float(probabilities.sum()), named))

    for name in ("top_k_top_p_sampling_from_probs", "min_p_sampling_from_probs"):
        monkeypatch.setattr(sampler, name, sampling, raising=False)  # on a GPU's host alone
    for backend in ("pytorch", "flashinfer"):
        server = SimpleNamespace(kernel=SimpleNamespace(sampling_backend=backend))
        monkeypatch.setattr(first_tokens, "get_exec", lambda server=server: server)
        first_tokens.compile_sampler(8, CPU)
    assert ran == [((2, 8), 2.0, {"filter_apply_order": "joint"}), ((2, 8), 2.0, {})]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ninja build failed\n/bin/sh: nvcc: not found")

    monkeypatch.setattr(sampler, "min_p_sampling_from_probs", fails)
    with pytest.raises(UnsupportedError, match=r"here \(/bin/sh: nvcc: not found\): use --samp"):
        first_tokens.compile_sampler(8, CPU)

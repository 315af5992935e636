"""Draft models as SGLang's workers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.engine.sources import draft_model
from adaserve.engine.sources.draft_model import DraftModel


def test_prompts_are_read_without_their_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are the target's. The draft's would take its LM head at every token of a prompt."""

    def init_new(batch: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(return_logprob=batch.return_logprob)

    monkeypatch.setattr(draft_model.ForwardBatch, "init_new", init_new)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda _: nullcontext())
    read: list[Any] = []
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(forward=read.append))
    layout: Any = None
    DraftModel("draft", worker, layout, "model").extend(SimpleNamespace(return_logprob=True))
    assert [batch.return_logprob for batch in read] == [False]

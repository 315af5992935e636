"""Draft models as SGLang's workers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.engine.sources import draft_model
from adaserve.engine.sources.draft_model import DraftModel


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What drafts are given of SGLang's batches."""

    def init_new(batch: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(**vars(batch))

    monkeypatch.setattr(draft_model.ForwardBatch, "init_new", init_new)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda _: nullcontext())
    return []


def extend(read: list[Any], tokens: list[int]) -> None:
    """A draft with nine tokens reads a prompt."""
    config, layout, ids = SimpleNamespace(vocab_size=9), None, torch.tensor(tokens)
    worker: Any = SimpleNamespace(model_runner=SimpleNamespace(forward=read.append, model_config=config))
    model = DraftModel("draft", worker, layout, "model")  # type: ignore[arg-type]
    prompt = SimpleNamespace(return_logprob=True, input_ids=ids, reqs=["r"], multimodal_inputs=["an image"])
    model.extend(prompt)
    assert prompt.multimodal_inputs == ["an image"] and prompt.input_ids.tolist() == tokens, "it is SGLang's"


def test_prompts_are_read_without_their_log_probabilities(read: list[Any]) -> None:
    """Those are the target's. The draft's would take its LM head at every token of a prompt."""
    extend(read, [3])
    assert [batch.return_logprob for batch in read] == [False]


def test_drafts_do_not_see_images(read: list[Any]) -> None:
    """Another model's would not fit, and tokens stand in their places by then."""
    extend(read, [3])
    assert [batch.multimodal_inputs for batch in read] == [[None]]


def test_tokens_that_only_the_target_has_are_not_looked_up(read: list[Any]) -> None:
    """A larger model of a family pads its vocabulary further, and clients may send any token of it."""
    extend(read, [3, 8, 9, 700])
    assert [batch.input_ids.tolist() for batch in read] == [[3, 8, 8, 8]]

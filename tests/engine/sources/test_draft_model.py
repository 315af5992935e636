"""Draft models as SGLang's workers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.checkpoints.draft_kind import EAGLE3, MTP
from adaserve.engine.sources import draft_model
from adaserve.engine.sources.draft_model import DraftModel, share_embeddings
from adaserve.errors import UnsupportedError


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


@pytest.mark.parametrize(
    ("name", "served"),
    [("LlamaForCausalLM", torch.float16), (EAGLE3, torch.bfloat16), (MTP, torch.bfloat16)],
)
def test_heads_have_the_targets_type(monkeypatch: pytest.MonkeyPatch, name: str, served: torch.dtype) -> None:
    """They are given its embedding and hidden states. The best known ones come in fp16, their targets in
    bf16."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]), dtype=torch.float16)
    monkeypatch.setattr(draft_model, "draft_config", lambda *_, **__: config)
    monkeypatch.setattr(draft_model, "require_supported_model", lambda _: None)
    worker: Any = SimpleNamespace(
        _path="draft", _of_target=torch.bfloat16, server_args=None, context_length=9
    )
    draft_model._DraftWorker._init_model_config(worker)
    assert worker.model_config.dtype is served


@pytest.mark.parametrize(("kind", "own"), [("eagle3", True), ("eagle3", False), ("mtp", False)])
def test_heads_share_nothing_that_is_quantized(monkeypatch: pytest.MonkeyPatch, kind: Any, own: bool) -> None:
    """SGLang says that a layer has no weight, or multiplies with packed numbers."""
    plain, packed, taken = torch.zeros(9, 4), torch.zeros(9, 4, dtype=torch.int32), list[Any]()

    def share(embed: Any, matrix: Any) -> None:
        def found(**_: Any) -> tuple[Any, Any]:
            return embed.weight, matrix.weight

        monkeypatch.setattr(draft_model, "resolve_draft_embed_and_head", found)
        head = SimpleNamespace(
            load_lm_head_from_target=not own,
            set_embed=lambda *given: taken.append(given),
            set_embed_and_head=lambda *given: taken.append(given),
        )
        config = SimpleNamespace(model_path="target", revision=None)
        runner = SimpleNamespace(model=None, model_config=config, load_config=None)
        share_embeddings(
            SimpleNamespace(model_runner=runner),
            SimpleNamespace(model_runner=SimpleNamespace(model=head)),
            kind,
        )

    in_16_bits, in_8_bits = SimpleNamespace(weight=plain), SimpleNamespace(weight=packed)
    share(in_16_bits, in_16_bits)
    for embed, matrix in ((in_16_bits, SimpleNamespace()), (in_8_bits, in_16_bits)):
        with pytest.raises(UnsupportedError, match="embedding and output matrix, which are quan"):
            share(embed, matrix)
    with nullcontext() if own else pytest.raises(UnsupportedError, match="quantized here"):
        share(in_16_bits, in_8_bits)
    assert taken[0] == ((plain,) if own else (plain, plain)) and len(taken) == 1 + own

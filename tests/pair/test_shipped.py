"""The pair in the package: complete, small, of one vocabulary, and as good as the documentation says."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from adaserve.pair import evaluate
from adaserve.pair.candidates import ModelDrafter
from adaserve.pair.eagle import HeadShape
from adaserve.pair.evaluate import load_drafter, mean_accepted, prompt_batch, tree_samples, write
from adaserve.pair.folders import HEAD, MEDUSA
from adaserve.pair.head_drafts import HeadDrafter
from adaserve.pair.long_context import long_prompts
from adaserve.pair.medusa import MedusaDrafter
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.shape import DRAFT, MEDUSA_DEPTH, MEDUSA_LAYERS, TARGET
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.pair.train import next_token_loss
from adaserve.pair.vocabulary import MAX_CONTEXT_TOKENS
from adaserve.sharpening import FILE_NAME, load_sharpening

WEIGHTS = Path(str(files("adaserve.pair").joinpath("weights")))


@pytest.fixture(scope="module")
def pair() -> tuple[TinyLlama, TinyLlama]:
    target, draft = (load_hf(WEIGHTS / name).requires_grad_(False) for name in ("target", "draft"))
    return target, draft


def test_shapes_and_size(pair: tuple[TinyLlama, TinyLlama]) -> None:
    assert [model.shape for model in pair] == [TARGET, DRAFT]
    assert sum(f.stat().st_size for f in WEIGHTS.rglob("*") if f.is_file()) < 10_000_000
    assert all((WEIGHTS / name / FILE_NAME).exists() for name in ("draft", HEAD, MEDUSA))


def test_one_vocabulary() -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        assert (WEIGHTS / "target" / name).read_bytes() == (WEIGHTS / "draft" / name).read_bytes()
    assert load_tokenizer(WEIGHTS / "target").get_vocab_size() == TARGET.vocab


def test_head_reads_this_target_and_is_accepted(pair: tuple[TinyLlama, TinyLlama]) -> None:
    target, _ = pair
    drafter = load_drafter(WEIGHTS / HEAD, target)
    assert isinstance(drafter, HeadDrafter)
    assert drafter.head.shape == HeadShape()
    sharpening = load_sharpening(WEIGHTS / HEAD)
    prompts = prompt_batch(load_tokenizer(WEIGHTS / "target"), "coding", 16, odd=False)
    written = write(target, prompts, 48, 0.7, seed=5)
    scale, spread = (float(x) for x in sharpening.with_shared_noise(0.7))
    samples = tree_samples(drafter, written, w=2, tau=1 / scale, every=8, noise=spread / scale)
    assert mean_accepted(samples) > 2.0


def test_medusa_heads_read_this_target_and_are_accepted(pair: tuple[TinyLlama, TinyLlama]) -> None:
    target, _ = pair
    drafter, sharpening = load_drafter(WEIGHTS / MEDUSA, target), load_sharpening(WEIGHTS / MEDUSA)
    assert isinstance(drafter, MedusaDrafter)
    assert (drafter.blocks.depth, drafter.blocks.layers) == (MEDUSA_DEPTH, MEDUSA_LAYERS)
    prompts = prompt_batch(load_tokenizer(WEIGHTS / "target"), "chat", 8, odd=False)
    written = write(target, prompts, 32, 0.7, seed=5)
    scale, spread = (float(x) for x in sharpening.with_shared_noise(0.7))
    samples = tree_samples(drafter, written, w=3, tau=1 / scale, every=4, noise=spread / scale)
    assert mean_accepted(samples) > 0.35


def test_target_has_read_such_text(pair: tuple[TinyLlama, TinyLlama]) -> None:
    """A uniform guess costs 8.3 nats per token, the draft 3.65, the target 3.40."""
    tokens = prompt_batch(load_tokenizer(WEIGHTS / "target"), "summarization", 8, odd=False)
    assert next_token_loss(pair[0], tokens).item() < 3.5
    assert next_token_loss(pair[1], tokens).item() < 3.8


def test_draft_is_accepted_and_its_probabilities_are_right(pair: tuple[TinyLlama, TinyLlama]) -> None:
    target, draft = pair
    sharpening = load_sharpening(WEIGHTS / "draft")
    tokenizer = load_tokenizer(WEIGHTS / "target")
    for temperature, least in ((0.0, 3.1), (0.7, 2.1)):
        written = write(target, prompt_batch(tokenizer, "coding", 24, odd=False), 48, temperature, seed=5)
        scale, spread = (float(x) for x in sharpening.with_shared_noise(temperature))
        samples = tree_samples(
            ModelDrafter(draft), written, w=2, tau=1 / scale, every=8, noise=spread / scale
        )
        accepted = mean_accepted(samples)
        predicted = torch.cat([torch.stack(t.probability, 1).sum((1, 2)) for t, _ in samples]).mean().item()
        assert accepted > least
        assert predicted == pytest.approx(accepted, rel=0.2)


@torch.no_grad()
def test_long_contexts_are_read_as_well_as_short_ones(pair: tuple[TinyLlama, TinyLlama]) -> None:
    """Without training on long windows the loss behind 5,000 tokens is near 5."""
    tokens = long_prompts(load_tokenizer(WEIGHTS / "target"), "summarization", 1, 6001)
    for model in pair:
        logits, wanted = model(tokens[:, :-1])[0], tokens[0, 1:]
        early, late = (
            torch.nn.functional.cross_entropy(logits[part], wanted[part]).item()
            for part in (slice(200, 1200), slice(5000, 6000))
        )
        assert late < early + 0.4


def test_many_rows_ask_for_no_more_long_texts_than_there_are(
    pair: tuple[TinyLlama, TinyLlama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come last: an hour of measuring would end in a refusal."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(evaluate, "WINDOWS", ())
    monkeypatch.setattr(evaluate, "write", lambda _, prompts, *__, **___: asked.append(prompts.shape))
    monkeypatch.setattr(evaluate, "noise_of", lambda *_: None)
    measured = evaluate.Evaluation(WEIGHTS, "draft", tmp_path, rows=1000, new=16, seed=0)
    measured._long_rows(pair[1], MAX_CONTEXT_TOKENS, 0.0, load_sharpening(WEIGHTS / "draft"))
    assert len(asked) == 2 and all(rows > 4 for rows, _ in asked)

"""An EAGLE-3 head that learns: the trainer's copy against a head in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaserve.engine.learning.learner import require_learnable
from adaserve.errors import UnsupportedError
from adaserve.sharpening import DraftSharpening
from adaserve.trainer import sharpening_fit
from adaserve.trainer.draft import checked, to_bytes
from adaserve.trainer.draft_head import STEPS, HeadCopy
from adaserve.trainer.records import Record
from adaserve.trainer.trainer import Recipe, Trainer
from tests.engine.heads import Head, following_head, frequent_tokens, head_target, save_head
from tests.trainer.factories import served

PLAIN = DraftSharpening((0.0, 1.0), (1.0, 1.0), shared=((0.0, 1.0), (1.0, 1.0), (0.0, 1.0)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Head]:
    """A folder with ``target`` and ``eagle3``, and both in plain torch."""
    folder = tmp_path_factory.mktemp("headed")
    target = head_target()
    head = following_head(target, frequent_tokens(target))
    target.save_pretrained(folder / "target")
    save_head(head, folder / "eagle3")
    return folder, target, head


def with_states(records: list[Record], head: Head) -> list[Record]:
    """As the tap hands them to a head."""
    texts = torch.tensor([r.tokens.tolist() for r in records])
    states = head.target_states(texts)[:, :-1].detach().half().numpy()
    return [replace(r, states=s) for r, s in zip(records, states, strict=True)]


def copy_of(folder: Path) -> HeadCopy:
    return HeadCopy(str(folder / "eagle3"), str(folder / "target"))


def drafted(head: Head, record: Record, place: int, steps: int) -> list[Tensor]:
    """Logits of the head behind each of the ``steps`` tokens from ``place`` on, of which it has read no
    target's states but those before the first one."""
    tokens = torch.tensor([record.tokens.tolist()])
    assert record.states is not None
    before = torch.from_numpy(record.states[None]).float()
    found = []
    for step in range(steps):
        end = place + 1 + step
        states = head(tokens[:, 1:end], before[:, : end - 1])
        found.append(head.logits(states)[0, -1])
        before = torch.cat((before[:, : end - 1], states[:, -1:]), 1)
    return found


def test_what_it_says_is_what_the_head_says(pair: tuple[Path, Any, Head]) -> None:
    """At the first step and at later ones, on its own guesses; on padded rows, too."""
    folder, target, head = pair
    long, short = with_states(served(target, 2), head)
    n = 9
    short = replace(
        short, tokens=short.tokens[: short.start + n + 1], logprobs=short.logprobs[:n],
        states=short.states[: short.start + n],
    )  # fmt: skip
    copied = copy_of(folder)
    assert [len(said) for said in copied.logits([long, short])] == [len(long), n]
    every = copied.unrolled([long, short])
    assert len(every) == STEPS
    for row, record in enumerate((long, short)):
        for place in (record.start, record.start + 4):
            right = drafted(head, record, place, STEPS)
            for step, logits in enumerate(right):
                said = every[step][row][place - record.start + step]
                known = said > sharpening_fit.UNKNOWN / 2
                assert torch.equal(known.nonzero()[:, 0], head.token_ids)
                torch.testing.assert_close(said[known], logits, atol=2e-3, rtol=1e-3)


def test_its_state_is_a_whole_checkpoint(pair: tuple[Path, Any, Head]) -> None:
    folder, _, _ = pair
    stored = load_file(folder / "eagle3" / "model.safetensors")
    copied = copy_of(folder)
    found = checked(to_bytes(copied.state()), copied.manifest())
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    before = copied.state()
    with torch.no_grad():
        for weight in copied.weights:
            weight.add_(0.5)
    changed = {name for name, t in copied.state().items() if not torch.equal(t, before[name])}
    assert changed and not any(name.startswith(("fc", "d2t", "t2d", "embed")) for name in changed)
    copied.load(before)
    assert all(torch.equal(t, before[name]) for name, t in copied.state().items())


def test_a_damaged_head_learns_on_what_was_served(pair: tuple[Path, Any, Head], tmp_path: Path) -> None:
    """And is judged better by requests that it has not seen."""
    folder, target, head = pair
    stored = load_file(folder / "eagle3" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    worse = {
        name: t + 0.3 * t.float().std() * torch.randn(t.shape, generator=generator).to(t.dtype)
        if name.startswith(("midlayer.self_attn", "midlayer.mlp", "lm_head")) else t
        for name, t in stored.items()
    }  # fmt: skip
    save_file(worse, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "eagle3" / "config.json").read_text())
    trainer = Trainer(
        HeadCopy(str(tmp_path), str(folder / "target")), [], Recipe(rate=3e-3, ema=0.9), sharpening=PLAIN,
        replay_bytes=1 << 24,
    )  # fmt: skip
    records = with_states(served(target, 160), head)
    trainer.learn(records[:128], lambda: None)
    found = trainer.judge(records[128:], lambda: None)
    assert found.verdict == "better"
    assert float(found.candidate.mean()) > 1.05 * float(found.present.mean())


def test_a_head_learns_nothing_from_served_tokens_that_it_does_not_know(pair: tuple[Path, Any, Head]) -> None:
    """With the hard loss, which has nothing but these tokens: no update can make such a one likelier."""
    folder, target, head = pair
    trainer = Trainer(copy_of(folder), [], Recipe(loss="hard"), sharpening=PLAIN, replay_bytes=1)
    records = with_states(served(target, 16), head)
    knows = torch.cat([torch.isin(sharpening_fit.served(r), head.token_ids) for r in records])
    said = zip(records, trainer.draft.logits(records), strict=True)
    loss = torch.cat([trainer.loss_on(record, logits) for record, logits in said])
    assert 0 < knows.sum() < len(knows)
    assert loss[~knows].eq(0).all() and 0 < loss[knows].mean() < 100


@pytest.mark.parametrize(
    ("change", "file", "why"),
    [
        ({"num_hidden_layers": 2}, "model.safetensors", "only EAGLE-3 heads of one layer"),
        ({"draft_vocab_size": None}, "model.safetensors", "an output matrix of their own"),
        ({"tie_word_embeddings": True}, "model.safetensors", "an output matrix of their own"),
        ({"norm_output": True}, "model.safetensors", "norm_output"),
        ({"hidden_size": 64}, "model.safetensors", "hidden size is not the target's"),
        ({"attention_bias": True}, "model.safetensors", "k_proj.bias is not as expected"),
        ({}, "pytorch_model.bin", "model.safetensors"),
    ],
)
def test_a_head_that_cannot_learn_is_refused_at_the_start(
    pair: tuple[Path, Any, Head], tmp_path: Path, change: dict[str, int], file: str, why: str
) -> None:
    """Or its trainer would end again and again, and only the log would say so."""
    folder, _, _ = pair
    target = str(folder / "target")
    require_learnable(None, str(folder / "eagle3"), target)
    config = json.loads((folder / "eagle3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    save_file(load_file(folder / "eagle3" / "model.safetensors"), tmp_path / file)
    with pytest.raises(UnsupportedError, match=f"(?s){why}.*: leave --learn out"):
        require_learnable(None, str(tmp_path), target)
    with pytest.raises((ValueError, OSError), match=why):
        HeadCopy(str(tmp_path), target)


def test_a_head_of_other_sizes_than_its_config_is_refused(
    pair: tuple[Path, Any, Head], tmp_path: Path
) -> None:
    folder, _, _ = pair
    config = json.loads((folder / "eagle3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1}))
    save_file(load_file(folder / "eagle3" / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError):
        HeadCopy(str(tmp_path), str(folder / "target"))

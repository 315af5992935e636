"""The embedded Medusa heads: their training network, their file format, and what they learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adaserve.checkpoints.medusa import load_medusa
from adaserve.pair.candidates import draft_trees
from adaserve.pair.evaluate import load_drafter
from adaserve.pair.folders import drafts_of
from adaserve.pair.medusa import MedusaBlocks, MedusaDrafter, heads_loss, save_blocks
from adaserve.pair.model import TinyLlama
from adaserve.pair.target_outputs import target_outputs
from tests.pair.test_training import TINY, random_model

DEPTH = 3


@pytest.fixture(scope="module")
def target() -> TinyLlama:
    return random_model()


def random_blocks(target: TinyLlama) -> MedusaBlocks:
    torch.manual_seed(1)
    blocks = MedusaBlocks(target, DEPTH, 2)
    for weight in blocks.heads.parameters():
        weight.data = (0.3 * torch.randn_like(weight)).half().float()
    return blocks.requires_grad_(False)


@torch.no_grad()
def test_a_level_is_what_one_head_says_behind_the_token_before_the_root(target: TinyLlama) -> None:
    blocks, tokens = random_blocks(target), torch.randint(2, TINY.vocab, (4, 8))
    states = target_outputs(target, tokens).last[:, -2]
    trees = draft_trees(MedusaDrafter(target, blocks), tokens, depth=DEPTH, w=2, tau=1.0)
    for level, paths in enumerate(trees.paths):
        logits = blocks(states, level)
        logits[:, [0, 1]] = -torch.inf  # what begins and ends a text
        best = logits.log_softmax(-1).topk(2)
        assert (paths[:, 0, -1] == best.indices[:, 0]).all()
        for row in range(4):
            assert set(paths[row, :, -1].tolist()) <= set(best.indices[row].tolist())
    after = MedusaDrafter(target, blocks).after(tokens)
    torch.testing.assert_close(after[:, -1], blocks(states, 0))


def test_written_and_read_again(target: TinyLlama, tmp_path: Path) -> None:
    blocks = random_blocks(target)
    save_blocks(blocks, tmp_path / "medusa")
    assert drafts_of(tmp_path) == ["medusa"]
    assert load_medusa(tmp_path / "medusa").lm_heads is None
    drafter = load_drafter(tmp_path / "medusa", target)
    assert isinstance(drafter, MedusaDrafter)
    for mine, read in zip(blocks.parameters(), drafter.blocks.parameters(), strict=True):
        assert torch.equal(mine, read)


def test_they_learn_what_the_target_says_later(target: TinyLlama) -> None:
    """Of one text, by heart."""
    torch.manual_seed(0)
    blocks, tokens = MedusaBlocks(target, 2, 1), torch.randint(2, TINY.vocab, (2, 10))
    seen = target_outputs(target, tokens)
    optimizer = torch.optim.Adam(blocks.heads.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = heads_loss(blocks, seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

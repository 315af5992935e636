"""`adaserve bench heads` walks as a server would, with trees that the training network confirms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adaserve.bench.heads import in_turns, summarize
from adaserve.bench.offline_drafting import (
    Course,
    HeadPlan,
    OfflineDraft,
    OfflineEagle,
    OfflineMedusa,
    OfflineModel,
    Text,
    Tree,
)
from adaserve.engine.cpu.linear import Storage
from adaserve.pair.candidates import Drafter, ModelDrafter, draft_trees
from adaserve.pair.generate import generate
from adaserve.pair.head_drafts import HeadDrafter
from adaserve.pair.medusa import MedusaDrafter
from adaserve.pair.model import TinyLlama
from adaserve.sharpening import load_sharpening
from tests.pair.test_heads import random_head
from tests.pair.test_medusa import random_blocks
from tests.pair.test_training import TINY, random_model

PLAN = HeadPlan(temperature=0.8, depth=3, width=2)
PROMPT, NEW = 6, 14


@pytest.fixture(scope="module")
def target() -> TinyLlama:
    return random_model()


@pytest.fixture(scope="module")
def texts(target: TinyLlama) -> list[Text]:
    """Of different lengths, written by the target's noise."""
    prompts = torch.randint(2, TINY.vocab, (5, PROMPT), generator=torch.Generator().manual_seed(4))
    keys = np.arange(11, 16, dtype=np.uint64)
    written = generate(target, prompts, NEW, torch.full((5,), PLAN.temperature), seed=0, keys=keys).numpy()
    return [
        Text(row[: len(row) - i], PROMPT, int(key))
        for i, (row, key) in enumerate(zip(written, keys, strict=True))
    ]


def expected(drafter: Drafter, text: Text, at: int, folder: Path) -> int:
    scale, spread = (float(v) for v in load_sharpening(folder).with_shared_noise(PLAN.temperature))
    context: Tensor = torch.from_numpy(text.tokens[: at + 1])[None]
    keys = np.array([text.key], np.uint64)
    trees = draft_trees(
        drafter, context, depth=3, w=2, tau=1 / scale, keys=keys, noise=spread / scale, never=()
    )
    return int(trees.accepted(torch.from_numpy(text.tokens[at + 1 : at + 4])[None])[0])


@pytest.mark.parametrize("kind", ["model", "eagle3", "medusa"])
def test_accepts_what_the_training_network_would(
    kind: str, target: TinyLlama, texts: list[Text], tmp_path: Path
) -> None:
    head, drafts, course = random_head(target), random_model(seed=0), Course(texts, 2, PLAN)
    draft: OfflineDraft
    drafter: Drafter
    if kind == "eagle3":
        draft, drafter = OfflineEagle(target, head, course, tmp_path), HeadDrafter(target, head)
    elif kind == "medusa":
        blocks, deeper = random_blocks(target), replace(PLAN, depth=PLAN.depth + 2)  # than there are heads
        draft = OfflineMedusa(target, blocks.published(), replace(course, plan=deeper), tmp_path)
        drafter = MedusaDrafter(target, blocks)
    else:
        draft, drafter = OfflineModel(drafts, course, tmp_path), ModelDrafter(drafts)
    draft.start()
    visited, accepted = set(), 0
    for _ in range(20):
        places = [(text, int(at)) for text, at in zip(draft.text, draft.at, strict=True)]
        tree = draft.step()
        wanted = [expected(drafter, texts[text], at, tmp_path) for text, at in places]
        assert list(tree.accepted) == wanted
        visited |= {text for text, _ in places}
        accepted += sum(wanted)
    assert visited == set(range(5)), "texts were left out"
    assert accepted > 3, "hardly anything was accepted"


def test_ratios_are_those_of_neighbors() -> None:
    class Counting:
        def __init__(self, seconds: list[float]) -> None:
            self.left = seconds

        def start(self) -> None: ...

        def step(self) -> Tree:
            return Tree((1, 2), self.left.pop(0), (0, 1))

    drafts: dict[tuple[str, Storage], Any] = {
        ("draft", "int8"): Counting([9, 1, 4, 1]),
        ("eagle3", "int8"): Counting([9, 0.5, 2, 5]),
        ("draft", "fp32"): Counting([9, 3, 12, 3]),
    }
    rows = {
        (row.draft, row.weights): row for row in summarize(in_turns(drafts, 3, lambda: None, lambda: None), 2)
    }
    head = rows["eagle3", "int8"]
    assert head.time_ratio == 0.5 and head.accepted == 1.5 and head.draft_ms == 2000
    assert rows["draft", "int8"].time_ratio == 1 and rows["draft", "fp32"].time_ratio == 3
    with pytest.raises(ValueError, match="no draft among eagle3"):
        summarize({("eagle3", "fp32"): [Tree((1,), 1.0, (0,))]}, 1)


def test_trees_of_one_text_are_no_independent_sample() -> None:
    """Of 400 trees of four texts whose own means differ, there are four that can be told apart by chance."""
    rng = np.random.default_rng(0)
    means = []
    for _ in range(200):
        ease = rng.normal(2.0, 0.5, 4)
        trees = [
            Tree(tuple(rng.poisson(np.maximum(0.1, ease)).tolist()), 1.0, (0, 1, 2, 3)) for _ in range(100)
        ]
        (row,) = summarize({("draft", "fp32"): trees}, 4)
        assert row.standard_error is not None
        means.append((row.accepted, row.standard_error))
    accepted, error = np.array(means).T
    assert np.sqrt((error**2).mean()) == pytest.approx(accepted.std(), rel=0.25)
    (alone,) = summarize({("draft", "fp32"): [Tree((1,), 1.0, (7,)), Tree((3,), 1.0, (7,))]}, 1)
    assert alone.standard_error is None and alone.accepted == 2

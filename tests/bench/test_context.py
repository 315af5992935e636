"""`adaserve bench context`: its tables and files, what drafts read, and the simulator beside MagicDec."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn import functional as fn
from typer.testing import CliRunner

from adaserve.bench.context.agreement import Agreement, TextPlan, measure_agreement
from adaserve.bench.context.report import Cell, Mode, rising_from, table, winner
from adaserve.bench.context.run import VERIFIED, ContextPlan, best_cells, run_context
from adaserve.bench.context.simulated import simulate_context
from adaserve.bench.context.speedup import Speedup, rises
from adaserve.bench.kernels import forward_inputs
from adaserve.cli import app
from adaserve.engine.cpu import build
from adaserve.pair.folders import PairError, weights_folder
from adaserve.pair.generate import Written
from adaserve.pair.long_context import CATEGORIES, long_prompts, ranks, sparse_logits, tree_tokens
from adaserve.pair.model import TinyLlama, rope, rotate
from adaserve.pair.shape import Shape as PairShape
from adaserve.pair.tokenizer import load_tokenizer

needs_kernels = pytest.mark.skipif(build.load_kernels() is None, reason="no C compiler here")


def cell(requests: int, context: int, mode: str, ratio: float) -> Cell:
    return Cell(requests, context, mode, 0.7, Speedup(1, 1.0, 0.0, 1.0, ratio))


def test_a_quick_run_has_the_sizes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[ContextPlan] = []
    monkeypatch.setattr("adaserve.bench.context.run.run_context", lambda plan, _: plans.append(plan))
    words = ["bench", "context", "--quick", "--contexts", "64", "--text-tokens", "300"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert plans[0].contexts == (64,) and plans[0].text.length == 300
    assert plans[0].requests == (1, 4) and plans[0].rounds == 2, "and few of all else"


def test_who_wins_and_where_it_rises() -> None:
    cells = [
        cell(n, length, mode, ratio)
        for mode, ratios in {"a": (0.9, 0.8, 1.5, 1.2), "b": (0.7, 0.9, 1.1, 1.4)}.items()
        for (length, n), ratio in zip([(1, 1), (1, 4), (2, 1), (2, 4)], ratios, strict=True)
    ]
    by_case = [[c for c in cells if (c.context, c.requests) == at] for at in ((1, 1), (2, 1), (2, 4))]
    assert [winner(case) for case in by_case] == ["plain", "a", "b"]
    assert rising_from(cells, "a") is None and rising_from(cells, "b") == 1
    text = table(cells)
    assert "- a: at no context" in text and "- b: from 1 tokens on" in text
    assert cells[3].tokens_per_s == pytest.approx(4 * 1.2)
    longest = [cell(1, 3, "b", 1.0)]
    assert rising_from([*cells, *longest], "b") == 1, "where more requests do not fit, nothing is known"
    assert rising_from(longest, "b") is None


@pytest.mark.parametrize("width", [1, 2, 3])
def test_expected_tokens_of_trees(width: int) -> None:
    """Walks down every tree, wherever the deepest one still fits."""
    ranked = torch.tensor([[0, 0, 2, 0, 1], [0, 1, 0, 0, 5]])
    places = [(row, start) for row in ranked.tolist() for start in range(len(row) - 2)]

    def walk(row: list[int], start: int, levels: int) -> int:
        accepted = 0
        for rank in row[start : start + levels]:
            accepted += rank < width
            if rank > 0:
                break
        return accepted

    expected = [1 + np.mean([walk(row, s, k) for row, s in places]) for k in range(4)]
    assert tree_tokens(ranked, 3, width) == pytest.approx(expected)


def test_a_rank_counts_what_the_noise_puts_first() -> None:
    text = Written(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[2, 0]]), np.zeros(1, np.uint64))
    logits = torch.tensor([[[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]])
    noise = torch.tensor([[[0.0, 0.0, 4.0], [0.0, 9.0, 4.0]]])
    assert ranks(logits, text, noise, 1.0, 0.0).tolist() == [[1, 0]]
    assert ranks(logits, text, noise, 1.0, 1.0).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("token_s", "sibling", "tree"), [(0.01, 0.0, (2, 1)), (0.01, 0.2, (2, 3)), (0.4, 0.2, (1, 1))]
)
def test_the_best_tree_is_taken_by_what_was_measured(
    token_s: float, sibling: float, tree: tuple[int, int]
) -> None:
    taken = {("verify", k): 1.0 + token_s * (k - 1) for k in VERIFIED} | {("draft full", 1): 0.2}
    tokens = {
        w: tuple(min(1 + 0.5 * k, 2.0) + (k > 0) * (w - 1) * sibling for k in range(9)) for w in (1, 2, 3)
    }
    (found,) = best_cells(taken, [Mode(False, 0)], {"draft full": Agreement(0.5, tokens)}, 4, 100)
    depth, width = tree
    assert (found.best.depth, found.best.width) == tree
    assert found.best.ratio == pytest.approx(
        tokens[width][depth] / (0.2 * depth + 1 + token_s * depth * width)
    )


def model() -> TinyLlama:
    torch.manual_seed(0)
    made = TinyLlama(PairShape(vocab=50, hidden=32, layers=1, mlp=16, heads=2, kv_heads=1))
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return made


def written(length: int = 20, new: int = 6) -> Written:
    tokens = torch.randint(0, 50, (2, length + new), generator=torch.Generator().manual_seed(1))
    return Written(tokens[:, :length], tokens[:, length:], np.zeros(2, np.uint64))


@torch.no_grad()
def test_a_window_that_leaves_nothing_out_changes_nothing() -> None:
    text, made = written(), model()
    full = made(text.whole[:, :-1])[:, 19:]
    for window in (0, 24, 100):
        assert torch.allclose(sparse_logits(made, text, window, 4), full, atol=1e-4)
    assert not torch.allclose(sparse_logits(made, text, 4, 2), full, atol=1e-2)


@torch.no_grad()
def test_only_sinks_and_window_are_read() -> None:
    """Against the attention of one layer, written out."""
    text, made, (sinks, window) = written(), model(), (2, 5)
    block, shape = made.blocks[0], made.shape
    cos, sin = rope(26, shape)
    x = made.embed(text.whole[:, :-1])
    q, k, v = block.qkv(block.attn_norm(x)).view(2, 25, -1, shape.head_dim).split([2, 1, 1], dim=2)
    q, k = (rotate(t.transpose(1, 2), cos[:25], sin[:25]) for t in (q, k))
    sees = torch.ones(25, 25, dtype=torch.bool).tril()
    for i in range(25):
        sees[i, sinks : max(sinks, i - window)] = False
    mixed = fn.scaled_dot_product_attention(q, k.expand_as(q), v.transpose(1, 2).expand_as(q), attn_mask=sees)
    x = x + block.out(mixed.transpose(1, 2).reshape(2, 25, -1))
    gate, up = block.gate_up(block.mlp_norm(x)).chunk(2, dim=-1)
    x = x + block.down(fn.silu(gate) * up)
    expected = fn.linear(made.norm(x), made.embed.weight)[:, 19:]
    assert torch.allclose(sparse_logits(made, text, window, sinks), expected, atol=1e-4)


def test_prompts_are_as_long_as_asked() -> None:
    tokenizer = load_tokenizer(weights_folder() / "target")
    texts = long_prompts(tokenizer, "coding", 3, 700)
    assert texts.shape == (3, 700)
    assert (long_prompts(tokenizer, "coding", 3, 300) == texts[:, :300]).all()
    with pytest.raises(PairError, match="held-out coding prompts have"):
        long_prompts(tokenizer, "coding", 100_000, 700)


def test_a_step_reads_the_end_of_its_context() -> None:
    made = forward_inputs(2, 1, context=30, read=10, vocab=50)
    plan = made.plan
    assert made.slots.tolist() == [30, 61] and made.positions.tolist() == [30, 30]
    assert plan.kv_indices.tolist() == [*range(20, 31), *range(51, 62)]
    assert plan.kv_indptr.tolist() == [0, 11, 22] and plan.qo_indptr.tolist() == [0, 1, 2]


def test_texts_and_all_that_reads_them_move_the_bar() -> None:
    bar, modes = Progress(disable=True), [Mode(False, 0), Mode(True, 32)]
    folders = weights_folder() / "target", weights_folder() / "draft"
    agreed = measure_agreement(*folders, modes, TextPlan(1, 64, 12, 0.8), [1], 2, bar)
    (task,) = bar.tasks
    assert task.finished and task.total == len(CATEGORIES) * 3 and len(agreed) == 2


@needs_kernels
def test_files_are_written(tmp_path: Path) -> None:
    plan = ContextPlan((1, 2), (64, 128), (32,), 1, 1, "fp32", TextPlan(1, 64, 12, 0.8), tmp_path)
    run_context(plan, Console(quiet=True))
    (record,), (text,), (picture,) = (list(tmp_path.glob(f"*.{kind}")) for kind in ("json", "md", "png"))
    cells = json.loads(record.read_text())["cells"]
    assert [c["mode"] for c in cells[:3]] == ["draft full", "draft 32", "self 32"] and len(cells) == 2 * 2 * 3
    assert cells[0]["requests"] == 1
    assert "synthetic KV cache" in text.read_text() and picture.stat().st_size > 1000


def test_the_simulator_writes_the_same(tmp_path: Path) -> None:
    command = ["simulate", "context", "--gpu", "h100", "--tp", "1", "--requests", "1,8", "--contexts", "8000"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {f.suffix for f in tmp_path.iterdir()} == {".json", ".md", ".png"}
    assert len(json.loads((tmp_path / "context.json").read_text())["cells"]) == 6
    assert CliRunner().invoke(app, ["simulate", "context", "--gpu", "abacus"]).exit_code == 2


def simulated(
    gpu: str, tp: int, requests: tuple[int, ...], contexts: tuple[int, ...]
) -> dict[tuple[int, int], float]:
    found = simulate_context("llama-3.1-8b", gpu, tp, requests, contexts, 512, 0.7, 0.85)
    return {(c.context, c.requests): c.best.ratio for c in found.cells if c.mode == "self 512"}


def test_magicdec_on_eight_a100() -> None:
    """Up to 1.84 with 32 to 256 requests, and more with every request at 8k."""
    ratios = simulated("a100", 8, (32, 64, 128, 256), (8000, 16_000, 32_000))
    assert max(ratios.values()) == pytest.approx(1.84, rel=0.2)
    assert rises([ratios[8000, n] for n in (32, 64, 128, 256)])


def test_magicdec_on_four_h100() -> None:
    """From 1.24 to 1.42."""
    ratios = simulated("h100", 4, (32, 64, 128), (16_000, 32_000))
    assert min(ratios.values()) > 1.24 * 0.8 and max(ratios.values()) < 1.42 * 1.2


def test_what_does_not_fit_is_left_out() -> None:
    assert set(simulated("a100", 1, (1, 64), (8000,))) == {(8000, 1)}
    with pytest.raises(ValueError, match="fewer requests"):
        simulated("a100", 1, (64,), (32_000,))

"""`adaserve bench heads`: trees of the embedded draft and of the embedded heads, over the same text.

The target continues held-out prompts, drawing by its own noise. Each draft then follows these texts as it
would on a server: it drafts a tree with the kernels that serve, takes the tokens that the text confirms and
one more, and goes on. Before each tree the served target verifies one token of each request, so that the
processor's caches hold what they would hold on a server. So accepted tokens and drafting time are those of a
server. Drafts are timed in turn, tree by tree, and compared by the median of the ratios of trees that were
drafted in the same turn.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from adaserve.bench.display import progress, table
from adaserve.bench.offline_drafting import (
    TARGET_WEIGHTS,
    Course,
    HeadPlan,
    OfflineDraft,
    Text,
    Tree,
    kernel_model,
    offline_drafts,
    over_pool,
)
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.trees.batch import TreeBatch
from adaserve.host.files import write_json
from adaserve.loadgen.results import provenance
from adaserve.pair.evaluate import prompt_batch, write
from adaserve.pair.folders import weights_folder
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.prompts import CATEGORIES
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.pair.widen import ensure_embedded_pair
from adaserve.terminal import say

BASE = "draft"

Key = TypeVar("Key")


def written_texts(target: TinyLlama, pair: Path, plan: HeadPlan, bar: Progress) -> list[Text]:
    """Held-out prompts of all categories in turns, continued at the plan's temperature."""
    tokenizer = load_tokenizer(pair / "target")
    by_category = []
    for category in bar.track(CATEGORIES, description="the target writes text"):
        prompts = prompt_batch(tokenizer, category, plan.rows, odd=False)
        written = write(target, prompts, plan.tokens, plan.temperature, seed=plan.seed + 1)
        rows = zip(written.whole.numpy(), written.keys.tolist(), strict=True)
        by_category.append([Text(tokens, prompts.shape[1], key) for tokens, key in rows])
    return [text for texts in zip(*by_category, strict=True) for text in texts]


def verification(network: TinyLlama, rows: int) -> Callable[[], object]:
    """The served target's forward over one token of each of ``rows`` requests."""
    table = torch.arange(rows, dtype=torch.int32)[:, None]
    served = kernel_model(network, 1, TARGET_WEIGHTS)
    forward = CpuForward(over_pool(served, network.shape.layers, rows), table)
    zeros, ones = np.zeros(rows, np.int64), np.ones(rows, np.int64)
    batch = TreeBatch.causal(zeros, np.arange(rows), zeros, ones)
    return lambda: forward.argmax(forward.run(batch))


def in_turns(
    drafts: Mapping[Key, OfflineDraft], trees: int, verify: Callable[[], object], done: Callable[[], None]
) -> dict[Key, list[Tree]]:
    """One tree of each draft that does not count, then ``trees`` rounds in alternating order. ``verify`` is
    called before each tree, and ``done`` after each round."""
    made: dict[Key, list[Tree]] = {name: [] for name in drafts}
    order = list(drafts)
    for draft in drafts.values():
        draft.start()
        draft.step()
    for _ in range(trees):
        order.reverse()
        for name in order:
            verify()
            made[name].append(drafts[name].step())
        done()
    return made


@dataclass(frozen=True)
class Row:
    """What one draft does at one batch size."""

    draft: str
    weights: str  # how they are stored
    batch: int
    accepted: float  # tokens per tree and request, without the bonus token
    standard_error: float | None  # over texts, since trees of one text are alike; None of a single text
    draft_ms: float
    time_ratio: float  # to the draft model in its first storage: the median over rounds


def summarize(made: Mapping[tuple[str, Storage], list[Tree]], batch: int) -> list[Row]:
    """A row for each draft. Raises ValueError without the draft model that they are compared with."""
    base_key = next((key for key in made if key[0] == BASE), None)
    if base_key is None:
        raise ValueError(f"there is no {BASE} among {', '.join(name for name, _ in made)}")
    rows = []
    for (name, weights), trees in made.items():
        accepted = [(text, n) for tree in trees for text, n in zip(tree.texts, tree.accepted, strict=True)]
        ratios = [mine.seconds / base.seconds for mine, base in zip(trees, made[base_key], strict=True)]
        rows.append(
            Row(
                draft=name,
                weights=weights,
                batch=batch,
                accepted=statistics.mean(n for _, n in accepted),
                standard_error=_standard_error(accepted),
                draft_ms=1e3 * statistics.median(tree.seconds for tree in trees),
                time_ratio=statistics.median(ratios),
            )
        )
    return rows


def _standard_error(accepted: Sequence[tuple[int, int]]) -> float | None:
    """The standard error of the mean of accepted tokens; ``accepted``: (text, tokens) of each tree."""
    mean = statistics.mean(n for _, n in accepted)
    off: dict[int, float] = defaultdict(float)  # by how many tokens a text moves the sum
    for text, n in accepted:
        off[text] += n - mean
    if len(off) < 2:
        return None
    return float(np.std(list(off.values()), ddof=1) * len(off) ** 0.5 / len(accepted))


def run_heads(plan: HeadPlan, path: Path, console: Console) -> None:
    """Measures the shipped drafts, prints a table, writes JSON."""
    made = provenance()
    torch.set_num_threads(plan.threads)
    pair = weights_folder()
    target = load_hf(pair / "target").requires_grad_(False)
    served = load_hf(ensure_embedded_pair()[0]).requires_grad_(False)
    rows: list[Row] = []
    with progress(console) as bar:
        texts = written_texts(target, pair, plan, bar)
        task = bar.add_task("trees", total=plan.trees * len(plan.batches))
        for batch in plan.batches:
            drafts = offline_drafts(pair, target, Course(texts, batch, plan))
            verify = verification(served, batch)
            rows += summarize(in_turns(drafts, plan.trees, verify, lambda: bar.advance(task)), batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema_version": 1, "kind": "bench heads", "made": made, "plan": asdict(plan)}
    write_json(path, {**body, "rows": [asdict(row) for row in rows]})
    _print(rows, plan)
    say(console, f"written to {path}")


def _print(rows: Sequence[Row], plan: HeadPlan) -> None:
    title = f"trees of depth {plan.depth} and width {plan.width}, T={plan.temperature:g}, in turns"
    columns = ("batch", "draft", "weights", "accepted", "+-", "draft ms", "of the draft's")
    made = table(title, columns, left=("draft", "weights"))
    for r in rows:
        made.add_row(
            str(r.batch), r.draft, r.weights, f"{r.accepted:.2f}",
            "-" if r.standard_error is None else f"{r.standard_error:.2f}",
            f"{r.draft_ms:.2f}", f"{r.time_ratio:.2f}x",
        )  # fmt: skip
    made.caption = (
        "accepted: tokens per tree and request without the bonus token; +-: their standard error over texts"
    )
    Console().print(made)

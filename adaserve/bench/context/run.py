"""Times of plain, draft and verification steps on this host's kernels, and what follows from them.

Forwards are those of the widened embedded pair, over a KV cache of made-up values: what they take does not
depend on the values. All are timed in turn and compared by medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from adaserve.bench.context.agreement import Agreement, TextPlan, measure_agreement
from adaserve.bench.context.report import Cell, Mode, table, write
from adaserve.bench.context.speedup import Drafting, Speedup, inflection
from adaserve.bench.display import progress
from adaserve.bench.kernels import SETS, forward_inputs, in_turns, kv_bytes, random_model, require_memory
from adaserve.engine.cpu import build
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.native import NativeBackend
from adaserve.loadgen.results import provenance
from adaserve.pair.folders import weights_folder
from adaserve.pair.shape import Shape, shape_of
from adaserve.pair.vocabulary import MAX_CONTEXT_TOKENS
from adaserve.pair.widen import Width, widened_shape
from adaserve.scheduler.costs.fit import fit_table
from adaserve.scheduler.costs.latency import TabulatedCost
from adaserve.terminal import say

TREES = (*((depth, 1) for depth in (1, 2, 3, 4, 6, 8)), *((d, w) for w in (2, 3) for d in (1, 2, 3, 4)))
"""Levels of a tree, and tokens at each of them. A draft step reads one token, whatever the width."""

DEEPEST, WIDTHS = max(depth for depth, _ in TREES), sorted({width for _, width in TREES})
VERIFIED = sorted({1} | {1 + depth * width for depth, width in TREES})
"""Tokens of one request in a forward of the target."""


@dataclass(frozen=True)
class ContextPlan:
    requests: Sequence[int]
    contexts: Sequence[int]
    windows: Sequence[int]  # of drafts, besides everything; the first one also of the target itself
    rounds: int
    threads: int
    storage: Storage
    text: TextPlan
    out: Path | None

    @property
    def modes(self) -> list[Mode]:
        drafts = [Mode(False, window) for window in (0, *self.windows)]
        return [*drafts, Mode(True, self.windows[0])]


class SyntheticCache:
    """A model with a KV cache that is full of made-up keys and values."""

    def __init__(self, shape: Shape, positions: int, storage: Storage, slots: int) -> None:
        weights, config = random_model(shape, positions)
        self.backend = NativeBackend(build.load_library(build.build()), weights, config, storage)
        size = (slots, shape.kv_heads, shape.head_dim)
        self._k, self._v = ([torch.ones(size) for _ in range(shape.layers)] for _ in range(2))
        self._vocab = shape.vocab

    def step(self, requests: int, tokens: int, context: int, read: int) -> Callable[[], torch.Tensor]:
        """A forward of ``tokens`` new ones of each request; it reads the last ``read`` of its ``context``."""
        inputs, backend = forward_inputs(requests, tokens, context, read, self._vocab), self.backend
        return lambda: backend.argmax(backend.forward(inputs, self._k, self._v))


def _shape(folder: Path) -> Shape:
    return shape_of(json.loads((folder / "config.json").read_text()))


Step = tuple[str, int]
"""("verify", tokens of each request) or (name of a mode, 1)."""


def steps(
    target: SyntheticCache, draft: SyntheticCache, modes: Sequence[Mode], requests: int, context: int
) -> dict[Step, Callable[[], torch.Tensor]]:
    """Every forward that a case needs."""
    calls = {("verify", k): target.step(requests, k, context, context) for k in VERIFIED}
    for mode in modes:
        model = target if mode.is_self else draft
        calls[mode.name, 1] = model.step(requests, 1, context, mode.reads(context))
    return calls


def best_cells(
    taken: dict[Step, float],
    modes: Sequence[Mode],
    agreed: Mapping[str, Agreement],
    requests: int,
    context: int,
) -> list[Cell]:
    """The best tree of every mode, given what its forwards take and how often it agrees."""
    cells = []
    for mode in modes:
        how = agreed[mode.name]
        plain_s, draft_s = taken["verify", 1], taken[mode.name, 1]
        every = [
            Speedup(d, plain_s, draft_s, taken["verify", 1 + d * w], how.tokens[w][d], w) for d, w in TREES
        ]
        cells.append(Cell(requests, context, mode.name, how.share, max(every, key=lambda s: s.ratio)))
    return cells


def run_context(plan: ContextPlan, console: Console) -> None:
    """Measures, prints the table and writes ``<set>.json``, ``.md`` and ``.png`` below ``plan.out``.

    Raises BuildError if the kernels cannot be compiled, and UserError if the requests with the longest
    context do not fit into memory.
    """
    made = provenance()
    torch.set_num_threads(plan.threads)
    modes = plan.modes
    folders = weights_folder() / "target", weights_folder() / "draft"
    positions = max(plan.contexts) + max(VERIFIED)
    slots = max(plan.requests) * positions
    shipped, slim = (_shape(folder) for folder in folders)
    wide = widened_shape(shipped, Width())
    require_memory(kv_bytes(wide, slots) + kv_bytes(slim, slots))
    cases = [(n, c) for c in plan.contexts for n in plan.requests]
    cells: list[Cell] = []
    points: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}  # of the target, of the draft
    with progress(console) as bar:
        agreed = measure_agreement(*folders, modes, plan.text, WIDTHS, DEEPEST, bar)
        target = SyntheticCache(wide, positions, plan.storage, slots)
        draft = SyntheticCache(slim, positions, plan.storage, slots)
        for n, context in bar.track(cases, description="requests x context"):
            every = in_turns(steps(target, draft, modes, n, context), plan.rounds)
            taken = {step: statistics.median(seconds) for step, seconds in every.items()}
            cells += best_cells(taken, modes, agreed, n, context)
            for (what, tokens), seconds in taken.items():
                mode = next((m for m in modes if m.name == what), Mode(is_self=True, window=0))
                points[mode.is_self].append((n * tokens, n * mode.reads(context), n, seconds))
    fitted = {is_target: fit_table(np.array(taken)) for is_target, taken in points.items()}
    _report(plan, made, cells, agreed, _inflections(plan, agreed, fitted), console)


def _inflections(
    plan: ContextPlan, agreed: Mapping[str, Agreement], fitted: dict[bool, TabulatedCost]
) -> str:
    """S_inflection of every mode, by the costs that fit what was measured."""
    lines = ["Of chains, by costs that fit these times, from any number of requests to the next:", ""]
    for mode in plan.modes:
        drafting = Drafting(mode.name, fitted[mode.is_self], agreed[mode.name].share, mode.window)
        length = inflection(fitted[True], drafting, plan.requests, DEEPEST)
        lines.append(
            f"- {mode.name}: {'at no context' if length is None else f'from {length:.0f} tokens on'}"
        )
    return "\n".join(lines)


def _report(
    plan: ContextPlan,
    made: Mapping[str, Any],
    cells: Sequence[Cell],
    agreed: Mapping[str, Agreement],
    inflections: str,
    console: Console,
) -> None:
    kind = SETS[build.load_library(build.build()).ada_vector_lanes()]
    title = f"# Speculation at long contexts, {kind}, {plan.threads} threads"
    text = "\n\n".join((title, _notes(plan), table(cells), inflections))
    say(console, text)
    if plan.out is None:
        return
    more = {
        "made": made, "set": kind, "threads": plan.threads, "storage": plan.storage,
        "rounds": plan.rounds, "text_tokens": plan.text.length, "temperature": plan.text.temperature,
        "agreement": {name: asdict(how) for name, how in agreed.items()},
    }  # fmt: skip
    write(plan.out, kind, f"Widened embedded pair, {kind}", text, cells, more)


def _notes(plan: ContextPlan) -> str:
    text = plan.text
    return (
        f"Times are medians of {plan.rounds} rounds in turns, of forwards alone, over a synthetic KV cache. "
        f"Acceptance is that of held-out texts of {text.length} tokens at T = {text.temperature:g}, at every "
        f"context; the pair has been trained on up to {MAX_CONTEXT_TOKENS}. A tree has levels x candidates, "
        "and continues after the best candidate only. What a server adds around an iteration is left out. "
        "T is a plain step, T_D a draft step, T_V a verification; * marks the winner."
    )

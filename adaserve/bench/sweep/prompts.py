"""Real prompts of the lengths that a workload asks for, after which the model does not repeat itself.

Acceptance measured on loops says nothing about text (``adaserve.bench.prompts``). So before a sweep every
prompt is continued once by plain decoding, and it is kept if its continuation is mostly distinct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from adaserve.bench.jsonl import read_lines
from adaserve.bench.prompts import DISTINCT, that_loop_least
from adaserve.bench.sweep.plan import SweepError
from adaserve.bench.sweep.workload import MAX_OUTPUT_TOKENS, Workload
from adaserve.pair.prompts import distinct_share, load_prompts

PER_CLASS, PER_URGENT_CLASS = 48, 96
LEAST = 16
_SEED = 0x9A0
_NEAREST = 6


@dataclass(frozen=True, slots=True)
class ClassPrompt:
    """One prompt of a class."""

    category: str
    text: str
    tokens: int  # in the served model's vocabulary
    distinct: float = 1.0  # share of its continuation's 8-grams that are distinct


@dataclass(frozen=True)
class PromptPool:
    """Prompts by class."""

    prompts: tuple[ClassPrompt, ...]

    def pick(self, category: str, tokens: int, rng: np.random.Generator) -> tuple[str, int]:
        """(text, tokens) of one of the prompts whose length is nearest to ``tokens``."""
        mine = [p for p in self.prompts if p.category == category]
        if not mine:
            raise SweepError(
                f"there is no prompt of class {category!r}, so the SLO classes are not those that this sweep "
                "began with: put them back, or give another folder with --out"
            )
        near = sorted(mine, key=lambda p: (abs(p.tokens - tokens), p.text))[:_NEAREST]
        chosen = near[int(rng.integers(len(near)))]
        return chosen.text, chosen.tokens

    def save(self, path: Path) -> None:
        lines = (json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in self.prompts)
        path.write_text("".join(lines), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PromptPool:
        return cls(tuple(ClassPrompt(**line) for line in read_lines(path)))


Continue = Callable[[Sequence[str], float, int], Sequence[tuple[int, Sequence[int]]]]
"""Texts, temperature, tokens to generate -> (prompt tokens, output ids) of each."""


def screened_pool(
    workload: Workload, urgent: str, proceed: Continue, size: float = 1.0
) -> tuple[PromptPool, dict[str, float]]:
    """The pool, and the share of candidates of each class whose continuation did not loop.

    ``size`` shrinks the number of candidates, for sweeps of few requests. If less than half pass, the
    most distinct half is taken: few prompts would mostly be found in the prefix cache."""
    kept: list[ClassPrompt] = []
    shares: dict[str, float] = {}
    for name in workload.names:
        n = round((PER_URGENT_CLASS if name == urgent else PER_CLASS) * min(1.0, size))
        candidates = _candidates(workload, name, max(LEAST, n))
        answers: list[tuple[int, Sequence[int]]] = []
        _, (longest,) = workload.scaled((), (MAX_OUTPUT_TOKENS,))
        for start in range(0, len(candidates), 32):
            answers += proceed(candidates[start : start + 32], workload.temperature, longest)
        tried = [
            ClassPrompt(name, text, tokens, round(distinct_share(ids), 3))
            for text, (tokens, ids) in zip(candidates, answers, strict=True)
        ]
        shares[name] = round(sum(p.distinct >= DISTINCT for p in tried) / len(tried), 3)
        best = that_loop_least([ids for _, ids in answers], -(-len(tried) // 2))
        kept += [tried[k] for k in best]
    return PromptPool(tuple(kept)), shares


def _candidates(workload: Workload, name: str, n: int) -> list[str]:
    """Texts of the class, of the lengths that the workload has."""
    shipped = load_prompts(name) or load_prompts()
    rng = np.random.default_rng([_SEED, *name.encode()])
    lengths, _ = workload.draw_lengths(name, n, rng)
    order = rng.permutation(len(shipped))
    found: dict[str, None] = {}
    for k, length in enumerate(lengths):
        turn = (shipped[int(order[(k + j) % len(order)])] for j in range(len(order)))
        found[cut_to(((p.text, p.tokens) for p in turn), length)] = None
    return list(found)


def cut_to(texts: Iterable[tuple[str, int]], tokens: int) -> str:
    """The end of as many texts as give ``tokens`` tokens, beginning at a line if one begins nearby.

    The end, since that is what a model continues."""
    parts: list[str] = []
    have = 0
    for text, count in texts:
        parts.insert(0, text)
        have += count
        if have >= 0.8 * tokens:
            break
    whole = "\n\n".join(parts)
    if have <= 1.25 * tokens:
        return whole
    n_chars = max(12, round(len(whole) * tokens / have))
    tail = whole[-n_chars:]
    breaks = [tail.find(mark) + len(mark) for mark in ("\n", ". ") if 0 <= tail.find(mark) < 0.3 * len(tail)]
    start = min(breaks, default=tail.find(" ") + 1 if " " in tail[: len(tail) // 3] else 0)
    return tail[start:] or tail

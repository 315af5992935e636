"""Traffic that differs from the paper's in kind: conversations, text that repeats itself, long prompts.

Each kind changes the requests of a point after classes, lengths and times were dealt (``build_rows``). They
are played in blocks of ``block_s`` seconds, each on a server that knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np

from adaserve.bench.repetition import OF_CLASS, repetitive
from adaserve.slo.trace import TraceRow

TURNS = 3
"""Turns of a conversation, at most."""
LONG_TOKENS = (512, 1280)
"""Prompt tokens of a long request are drawn evenly from this range, in logarithms."""
MAX_CONTEXT = 1792
"""Tokens that a conversation may grow to. It is from when the embedded pair held 2,048 (8,192 now), and stays
so that sweeps can be compared."""

Rows = Sequence[TraceRow]


def sessions(rows: Rows, rng: np.random.Generator, block_s: float) -> list[TraceRow]:
    """Requests of a class, three in a row, become turns of one conversation; each carries those before it. A
    conversation ends with its block.

    ``prompt_tokens`` of a later turn count the whole conversation so far, as its TTFT SLO does."""
    open_turns: dict[tuple[str, int], tuple[str, int, int]] = {}  # class and block -> session, turns, tokens
    done = []
    for i, row in enumerate(rows):
        place = row.slo_class or "", int(row.arrival_s // block_s)
        name, turns, tokens = open_turns.get(place, ("", TURNS, 0))
        whole = tokens + row.prompt_tokens
        if turns == TURNS or whole + row.output_tokens > MAX_CONTEXT:
            name, turns, whole = f"conversation-{i}", 0, row.prompt_tokens
        open_turns[place] = (name, turns + 1, whole + row.output_tokens)
        done.append(replace(row, session_id=name, prompt_tokens=whole))
    return done


def repetition(rows: Rows, rng: np.random.Generator, block_s: float) -> list[TraceRow]:
    """Prompts whose answers repeat them: edits of a file, quoting turns, filled templates."""
    per_token = sum(len(r.text or "") for r in rows) / max(1, sum(r.prompt_tokens for r in rows))
    seed = int(rng.integers(1 << 31))
    texts = {kind: cycle(repetitive((kind,), len(rows), seed)) for kind in OF_CLASS.values()}
    done = []
    for row in rows:
        text = str(next(texts[OF_CLASS.get(row.slo_class or "", "edits")]).prompt)
        done.append(replace(row, text=text, prompt_tokens=max(1, round(len(text) / per_token))))
    return done


def long_prompts(rows: Rows, rng: np.random.Generator, block_s: float) -> list[TraceRow]:
    """Prompts of hundreds of tokens: texts of the same class in a row, the request's own last."""
    low, high = np.log(LONG_TOKENS)
    done = []
    for row in rows:
        wanted = float(np.exp(rng.uniform(low, high)))
        others = [r for r in rows if r.slo_class == row.slo_class]
        texts, tokens = [row.text or ""], row.prompt_tokens
        while tokens < wanted:
            other = others[int(rng.integers(len(others)))]
            texts.insert(0, other.text or "")
            tokens += other.prompt_tokens
        done.append(replace(row, text="\n\n".join(texts), prompt_tokens=tokens))
    return done


KINDS: Mapping[str, Callable[[Rows, np.random.Generator, float], list[TraceRow]]] = {
    "sessions": sessions,
    "repetition": repetition,
    "long": long_prompts,
}

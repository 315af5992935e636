"""Greedy answers that are compared token by token, and their time per token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaserve.bench.client import Ask, send


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request."""

    output_ids: tuple[int, ...]
    seconds: float
    margins: tuple[float, ...] = ()  # best minus second log-probability at every token, where asked for
    verifications: int = 0  # of a server that speculates


@dataclass(frozen=True, slots=True)
class Pace:
    """Of answers that were generated at the same time."""

    ms: float  # per output token after the first
    accept_length: float | None = None  # tokens per verification; None = without speculation


def generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, margins: bool = False) -> list[Answer]:
    """All prompts at once, greedy, exactly ``tokens`` tokens each. Raises httpx.HTTPError."""
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2} if margins else {}
    answers = []
    for reply in send(url, [Ask(p, tokens) for p in prompts], **more):
        top = reply.meta.get("output_top_logprobs") or []
        made = tuple(t[0][0] - t[1][0] for t in top), int(reply.meta.get("spec_verify_ct") or 0)
        answers.append(Answer(reply.output_ids, reply.seconds, *made))
    return answers


def first_s(url: str, prompts: Sequence[Sequence[int]]) -> float:
    """Mean seconds of requests for one token with the prompts cached: prefill, HTTP and tokenizer."""
    # The smallest of three: one hiccup in so short a time would make the rest look faster than it is.
    return min(statistics.mean(a.seconds for a in generate(url, prompts, 1)) for _ in range(3))


def pace(url: str, prompts: Sequence[Sequence[int]], tokens: int, first_s: float) -> Pace:
    """Means over the requests, with the prompts cached. ``first_s`` is taken off."""
    whole = generate(url, prompts, tokens)
    ms = (statistics.mean(a.seconds for a in whole) - first_s) / (tokens - 1) * 1e3
    verifications = sum(a.verifications for a in whole)
    return Pace(ms, len(whole) * (tokens - 1) / verifications if verifications else None)


def margin_noise(ones: Sequence[Answer], others: Sequence[Answer]) -> float:
    """By how much margins differ that would be the same if nothing was rounded, at most: those of equal
    tokens after equal ones, and at the first unequal ones the way from one margin through 0 to the other."""
    worst = 0.0
    for a, b in zip(ones, others, strict=False):
        at = first_difference(a.output_ids, b.output_ids)
        worst = max([worst, *(abs(x - y) for x, y in zip(a.margins[:at], b.margins[:at], strict=False))])
        if at is not None:
            worst = max(worst, a.margins[at] + b.margins[at])
    return worst


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Place of the first unequal token; None when the shorter one is a prefix of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)

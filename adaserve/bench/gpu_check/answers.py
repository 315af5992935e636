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
    margins: tuple[float, ...] = ()  # best minus second log-probability at every token, where asked for
    verifications: int = 0  # of a server that speculates
    tpot_ms: float | None = None  # as SGLang has measured it: from the end of the prefill on


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
        margins_of = tuple(t[0][0] - t[1][0] for t in top)
        verifications = int(reply.meta.get("spec_verify_ct") or 0)
        tpot_ms = 1e3 / per_s if (per_s := reply.meta.get("decode_throughput")) else None
        answers.append(Answer(reply.output_ids, margins_of, verifications, tpot_ms))
    return answers


def pace(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Pace:
    """Means over the requests. Raises ValueError where the server measures no time per token."""
    whole = generate(url, prompts, tokens)
    paces = [a.tpot_ms for a in whole if a.tpot_ms is not None]
    if len(paces) < len(whole):
        raise ValueError("the server measures no time per token: it must run with --enable-metrics")
    verifications = sum(a.verifications for a in whole)
    accepted = len(whole) * (tokens - 1) / verifications if verifications else None
    return Pace(statistics.mean(paces), accepted)


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

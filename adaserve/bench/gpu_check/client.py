"""Concurrent greedy requests, timed one by one."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request."""

    output_ids: tuple[int, ...]
    seconds: float
    margins: tuple[float, ...] = ()  # best minus second log-probability at every token, where asked for


def generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, margins: bool = False) -> list[Answer]:
    """All prompts at once, greedy, ``tokens`` each whatever they say. Raises httpx.HTTPError."""
    return asyncio.run(_generate(url, prompts, tokens, margins))


async def _generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, margins: bool) -> list[Answer]:
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=1800.0, limits=limits) as client:
        return list(await asyncio.gather(*(_one(client, p, tokens, margins) for p in prompts)))


async def _one(client: httpx.AsyncClient, prompt: Sequence[int], tokens: int, margins: bool) -> Answer:
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    if margins:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    start_s = time.perf_counter()
    answer = (await client.post("/generate", json=body)).raise_for_status().json()
    seconds = time.perf_counter() - start_s
    top = answer["meta_info"].get("output_top_logprobs") or []
    return Answer(tuple(answer["output_ids"]), seconds, tuple(t[0][0] - t[1][0] for t in top))


def tpot_ms(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Mean ms per output token behind the first, prompts cached before.

    The time of a request for one token is taken off, so that prefill, HTTP and tokenizer do not count.
    """
    generate(url, prompts, 1)
    # The least of three: one hiccup in so short a time would make the rest look faster than it is.
    first_s = min(statistics.mean(a.seconds for a in generate(url, prompts, 1)) for _ in range(3))
    whole_s = statistics.mean(a.seconds for a in generate(url, prompts, tokens))
    return (whole_s - first_s) / (tokens - 1) * 1e3


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Place of the first unequal token; None when the shorter one is a prefix of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)

"""Requests to SGLang's own ``/generate``, outside of load tests: one batch, many at once, one stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from adaserve.server import ServerError
from adaserve.slo.replay_lengths import ANSWER_TOKENS

TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; it generates exactly ``tokens`` tokens, or at most that many with a schema."""

    prompt: str | Sequence[int]  # text, or token ids
    tokens: int
    temperature: float = 0.0
    slo_class: str | None = None
    slo_tpot_ms: float | None = None
    json_schema: str | None = None
    stated_max_tokens: int | None = None  # a looser bound to state; a replaying server is told ``tokens``

    def plain(self) -> Ask:
        """The same without an SLO, for servers without AdaServe."""
        return replace(self, slo_class=None, slo_tpot_ms=None)

    def body(self, **more: Any) -> dict[str, Any]:
        """The JSON body; ``more``: further keys of it."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": max(self.tokens, self.stated_max_tokens or 0),
            "ignore_eos": self.json_schema is None,
        }
        if self.json_schema is not None:
            params["json_schema"] = self.json_schema
        ends = None if self.stated_max_tokens is None else self.tokens
        custom = {"slo_class": self.slo_class, "slo_tpot_ms": self.slo_tpot_ms, ANSWER_TOKENS: ends}
        if given := {k: v for k, v in custom.items() if v is not None}:
            params["custom_params"] = given
        prompt = {"text": self.prompt} if isinstance(self.prompt, str) else {"input_ids": list(self.prompt)}
        return {**prompt, "sampling_params": params, **more}


@dataclass(frozen=True, slots=True)
class Reply:
    """What ``/generate`` answered to one request."""

    output_ids: tuple[int, ...]
    meta: dict[str, Any]


def batch(url: str, asks: Sequence[Ask]) -> list[dict[str, Any]]:
    """Answers to one call with all requests, in order. Raises httpx.HTTPError."""
    bodies = [ask.body() for ask in asks]
    body = {key: [b[key] for b in bodies] for key in bodies[0]}
    answer = httpx.post(url + "/generate", json=body, timeout=TIMEOUT_S).raise_for_status().json()
    return list(answer)


def send(url: str, asks: Sequence[Ask], at_once: int | None = None, **more: Any) -> list[Reply]:
    """Sends every request on a connection of its own; replies in order. Raises httpx.HTTPError.

    At most ``at_once`` of them run at any time."""
    return asyncio.run(_send(url, asks, at_once or len(asks), more))


async def _send(url: str, asks: Sequence[Ask], at_once: int, more: dict[str, Any]) -> list[Reply]:
    limits = httpx.Limits(max_connections=None)
    turn = asyncio.Semaphore(max(1, at_once))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(ask: Ask) -> Reply:
            async with turn:
                answer = (await client.post("/generate", json=ask.body(**more))).raise_for_status().json()
            return Reply(tuple(answer["output_ids"]), answer["meta_info"])

        return list(await asyncio.gather(*map(one, asks)))


def send_in_order(url: str, asks: Sequence[Ask], at_once: int) -> list[Reply]:
    """Sends each request when the one before has its first token and fewer than ``at_once`` run.

    Replies are in order. Every prompt is prefilled alone and in its turn, so a server whose requests are
    numbered (`ServerProcess.number_requests`) writes the same texts again. Raises httpx.HTTPError."""
    return asyncio.run(_send_in_order(url, asks, at_once))


async def _send_in_order(url: str, asks: Sequence[Ask], at_once: int) -> list[Reply]:
    turn, replies = asyncio.Semaphore(at_once), []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        for ask in asks:
            await turn.acquire()
            begun = asyncio.Event()
            replies.append(asyncio.create_task(_streamed(client, ask, begun, turn)))
            await begun.wait()
        return list(await asyncio.gather(*replies))


async def _streamed(
    client: httpx.AsyncClient, ask: Ask, begun: asyncio.Event, turn: asyncio.Semaphore
) -> Reply:
    """``begun`` is set at the first token, or when the request has failed."""
    last = ""
    try:
        async with client.stream("POST", "/generate", json=ask.body(stream=True)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    last = line
                    begun.set()
    finally:
        begun.set()
        turn.release()
    answer = json.loads(last.removeprefix("data: "))
    return Reply(tuple(answer["output_ids"]), answer["meta_info"])


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer: when the request left, when each chunk came, and the tokens by then."""

    start_s: float
    times: list[float]
    tokens: list[int]
    prompt_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.start_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Raises ServerError for an answer in one piece."""
        if self.tokens[-1] == self.tokens[0]:
            raise ServerError("the server sent its answer in one piece: no latency per token can be measured")
        return (self.times[-1] - self.times[0]) / (self.tokens[-1] - self.tokens[0]) * 1e3


def stream(url: str, ask: Ask) -> Streamed:
    """Raises ServerError for an answer without a token, httpx.HTTPError."""
    times: list[float] = []
    tokens: list[int] = []
    prompt_tokens, start_s = 0, time.perf_counter()
    with httpx.stream("POST", url + "/generate", json=ask.body(stream=True), timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                meta = json.loads(line[6:])["meta_info"]
                tokens.append(meta["completion_tokens"])
                prompt_tokens = meta["prompt_tokens"]
    if not times:
        raise ServerError("the server answered without a token")
    return Streamed(start_s, times, tokens, prompt_tokens)

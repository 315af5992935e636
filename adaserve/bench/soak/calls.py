"""The requests of a soak as data: what is sent, and how its client behaves."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from adaserve.slo.classes import CUSTOM_CLASS, DEFAULT_CLASS

MODEL = "adaserve-embedded"
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
OLLAMA_GENERATE, OLLAMA_CHAT = "/api/generate", "/api/chat"
OLLAMA = (OLLAMA_GENERATE, OLLAMA_CHAT)

LEAVING = "leaving"
"""SLO class of requests that end early: nobody can know how many of them the server finished."""
UNTOLD = "untold"
"""SLO class of Ollama's streams, which do not say how many tokens they had."""
CLASSES: dict[str, dict[str, float]] = {
    "coding": {"x_baseline": 3.0},
    "chat": {"tpot_ms": 150.0, "ttft_ms": 1500.0},
    "summarization": {"x_baseline": 20.0},
    LEAVING: {"tpot_ms": 200.0},
    UNTOLD: {"tpot_ms": 300.0},
}
"""The classes file of the soak's server. Loose, since tight SLOs keep other prompts waiting."""

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
REGEXES = (r"(yes|no|maybe), [0-9]{2,4}\.", r"[a-f]{3,9}(-[0-9]{2}){1,3}", r"(red|green|blue)( [a-z]{4})?")


class End(Enum):
    """How a client ends its request."""

    ANSWERED = "answered"
    LEFT_EARLY = "left before the first token"
    LEFT_AMID = "left in the middle"
    ABORTED = "aborted by id"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    kind: str  # its name in the report
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    slo_class: str = DEFAULT_CLASS  # under which the server must count it
    case: int | None = None  # number of the reference answer that it must equal
    refused: bool = False  # must get 400
    end: End = End.ANSWERED
    end_after: float = 0.0  # seconds; events of a stream for LEFT_AMID
    pause_s: float = 0.0  # a slow reader's pause after each event

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream", False))

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters, under SGLang's names if they differ."""
        if self.path == GENERATE:
            return dict(self.body["sampling_params"])
        given = self.body.get("options", self.body)
        length = given.get("num_predict", given.get("max_tokens"))
        return {**given, "max_new_tokens": length, "min_new_tokens": given.get("min_tokens", 0)}

    @property
    def prompts(self) -> int:
        prompt = self.body.get("text", self.body.get("input_ids", self.body.get("prompt")))
        return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1

    @property
    def choices(self) -> int:
        """Sequences that it asks for."""
        return self.prompts * int(self.params.get("n") or 1)

    @property
    def most_tokens(self) -> int:
        """Output tokens of all its sequences, at most."""
        return self.choices * int(self.params["max_new_tokens"])


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a session; each one continues the last one's answer."""

    turns: tuple[Call, ...]


def slo_of(rng: random.Random) -> tuple[dict[str, str], dict[str, Any], str]:
    """Headers, ``custom_params`` and class label of a random SLO; often none."""
    draw = rng.random()
    if draw < 0.4:
        return {}, {}, DEFAULT_CLASS
    name = rng.choice(("coding", "chat", "summarization"))
    if draw < 0.65:
        return {"x-slo-class": name}, {}, name
    if draw < 0.75:
        return {}, {"slo_class": name}, name
    tpot_ms = round(rng.uniform(50, 1000) if rng.random() < 0.9 else rng.uniform(1, 50), 1)
    if draw < 0.85:
        return {"x-slo-tpot-ms": str(tpot_ms)}, {}, CUSTOM_CLASS
    if draw < 0.93:
        return {}, {"slo_tpot_ms": tpot_ms, "slo_ttft_ms": rng.choice((50, 500, 5000))}, CUSTOM_CLASS
    return {"x-slo-class": name, "x-slo-ttft-ms": "800"}, {}, CUSTOM_CLASS


def refusals(vocab: int) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of requests that must get 400, whatever else is going on."""
    few = {"max_new_tokens": 4}
    ids = {"input_ids": [5, 17, 33]}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    native: list[dict[str, Any]] = [
        {"input_ids": [5, vocab], "sampling_params": few},
        {"input_ids": [[5], [-1]], "sampling_params": few},
        {"input_ids": [[5], []], "sampling_params": few},
        {"text": "", "sampling_params": few},
        {**ids, "sampling_params": {**few, "stop_token_ids": [vocab], "min_new_tokens": 2}},
        {**ids, "sampling_params": {**few, "logit_bias": {str(vocab): 1.0}}},
        {**ids, "sampling_params": {**few, "top_k": 2**31}},
        {**ids, "sampling_params": {**few, "n": 10**9}},
        {**ids, "sampling_params": {**few, "temperature": -1}},
        {**ids, "sampling_params": {**few, "json_schema": '{"$ref": "#"}'}},
        {**ids, "sampling_params": {**few, "stop_regex": "(a+)+$"}},
        {**ids, "sampling_params": {**few, "custom_params": {"slo_tpot_ms": -1}}},
        {**ids, "sampling_params": few, "return_logprob": True, "top_logprobs_num": vocab + 1},
        {**ids, "sampling_params": few, "rid": ""},
        {**ids, "sampling_params": few, "session_params": {"id": "nobody"}},
    ]
    return [
        *((GENERATE, body) for body in native),
        (COMPLETIONS, {"model": MODEL, "prompt": "", "max_tokens": 4}),
        (COMPLETIONS, {"model": MODEL, "prompt": "hello", "max_tokens": 4, "logprobs": 5000}),
        (CHAT, {**chat, "messages": []}),
        (CHAT, {**chat, "top_k": 2**31}),
        (OLLAMA_CHAT, {"model": MODEL, "messages": [], "stream": False}),
        (OLLAMA_GENERATE, {"model": MODEL, "prompt": "a", "stream": False, "options": {"top_k": 2**31}}),
    ]

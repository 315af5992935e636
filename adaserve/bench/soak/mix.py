"""Draws the requests of a soak: the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adaserve.bench.soak.calls import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    LEAVING,
    MODEL,
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    REGEXES,
    SCHEMA,
    UNTOLD,
    Call,
    Conversation,
    End,
    refusals,
    slo_of,
)
from adaserve.slo.classes import DEFAULT_CLASS

EXACT, REFUSED, SESSION, LEAVES = 0.35, 0.06, 0.04, 0.08
"""Shares of calls that are compared with a reference, are refused, open a session, or end early."""
SLOW = 0.03
LONGEST = 120
"""Tokens that a call generates at most, and about that many may be in a prompt."""


BLOCK = 100
CLIENTS = 1000
"""Seeds k x CLIENTS to (k + 1) x CLIENTS - 1 are those of one soak's clients."""
PENALTIES = ("penalties", "logit_bias", "min_new_tokens")
FLAVORS: tuple[tuple[str, ...], ...] = (
    (),
    PENALTIES,
    (*PENALTIES, "filters"),
    (*PENALTIES, "json_schema", "regex", "filters"),
    (*PENALTIES, "json_schema", "regex", "filters", "logprobs"),
)
"""Kinds of requests and settings that a block of calls goes without."""


def piece(texts: Sequence[str], rng: random.Random) -> str:
    """A piece of one of a few texts, often its beginning, so that some prompts share prefixes."""
    text = rng.choice(texts)
    start = rng.choice((0, 0, rng.randrange(len(text) // 2)))
    return text[start : start + rng.choice((6, 25, 60, 120, 240))].strip() or "import os"


def length(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 4, 6, 8, 8, 10, 16, 24, LONGEST if rng.random() < 0.2 else 12))


def greedy_cases(texts: Sequence[str], seed: int, count: int = 64) -> list[Call]:
    """Greedy requests of every route and kind whose answers nothing may change."""
    rng = random.Random(seed)
    kinds = (
        _plain, _plain, _logprobs, _penalized, _biased, _stopped, _least, _schema, _regex, _choices, _ids,
        _completion, _completion, _chat, _ollama,
    )  # fmt: skip
    return [replace(kinds[i % len(kinds)](piece(texts, rng), rng), case=i) for i in range(count)]


def _native(kind: str, text: str, rng: random.Random, **params: Any) -> Call:
    given = {"temperature": 0, "max_new_tokens": length(rng), **params}
    return Call(kind, GENERATE, {"text": text, "sampling_params": given})


def _plain(text: str, rng: random.Random) -> Call:
    return _native("native", text, rng, ignore_eos=rng.random() < 0.5)


def _ids(_: str, rng: random.Random) -> Call:
    params = {"temperature": 0, "max_new_tokens": length(rng), "ignore_eos": True}
    prompt = [rng.randrange(2, 4000) for _ in range(rng.choice((1, 5, 30, 100)))]
    return Call("native, token ids", GENERATE, {"input_ids": prompt, "sampling_params": params})


def _logprobs(text: str, rng: random.Random) -> Call:
    call = _native("logprobs", text, rng, ignore_eos=True)
    return replace(call, body={**call.body, "return_logprob": True, "top_logprobs_num": rng.choice((0, 3))})


def _penalized(text: str, rng: random.Random) -> Call:
    name, value = rng.choice(
        (("frequency_penalty", 0.7), ("presence_penalty", 1.1), ("repetition_penalty", 1.3))
    )
    return _native("penalties", text, rng, ignore_eos=True, **{name: value})


def _biased(text: str, rng: random.Random) -> Call:
    bias = {str(rng.randrange(2, 4000)): rng.choice((-8.0, 2.5, 6.0)) for _ in range(3)}
    return _native("logit_bias", text, rng, logit_bias=bias)


def _stopped(text: str, rng: random.Random) -> Call:
    return _native("stop strings", text, rng, stop=rng.sample(["e", "\n", "self", ")", " the", "return"], 2))


def _least(text: str, rng: random.Random) -> Call:
    return _native("min_new_tokens", text, rng, max_new_tokens=24, min_new_tokens=rng.choice((3, 12)))


def _schema(text: str, rng: random.Random) -> Call:
    return _native("json_schema", text, rng, max_new_tokens=60, json_schema=SCHEMA)


def _regex(text: str, rng: random.Random) -> Call:
    return _native("regex", text, rng, max_new_tokens=40, regex=rng.choice(REGEXES))


def _choices(text: str, rng: random.Random) -> Call:
    if rng.random() < 0.5:
        return _native("n > 1", text, rng, n=rng.choice((2, 3)))
    call = _native("batch", text, rng)
    return replace(call, body={**call.body, "text": [text, text[:5] or "a", "def f("]})


def _completion(text: str, rng: random.Random) -> Call:
    body = {"model": MODEL, "prompt": text, "max_tokens": length(rng), "temperature": 0}
    if rng.random() < 0.3:
        body["logprobs"] = 2
    if rng.random() < 0.2:
        body["prompt"] = [text, "import "]
    return Call("completions", COMPLETIONS, body)


def _chat(text: str, rng: random.Random) -> Call:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": length(rng), "temperature": 0}
    return Call("chat", CHAT, body)


def _ollama(text: str, rng: random.Random) -> Call:
    options = {"temperature": 0, "num_predict": length(rng)}
    body: dict[str, Any] = {"model": MODEL, "stream": False, "options": options}
    if rng.random() < 0.5:
        return Call("ollama", OLLAMA_GENERATE, {**body, "prompt": text})
    return Call("ollama", OLLAMA_CHAT, {**body, "messages": [{"role": "user", "content": text}]})


class Mix:
    """An endless series of calls.

    Every BLOCK calls its flavor changes, so that batches are at times all alike: one penalty or filter in a
    batch takes all of it off the shortest path."""

    def __init__(self, seed: int, texts: Sequence[str], cases: Sequence[Call], vocab: int) -> None:
        self._rng = random.Random(seed)
        self._name = f"{seed}"
        self._texts = texts
        self._flavors = random.Random(seed // CLIENTS)  # the same for all clients of a soak
        self._cases = cases
        self._refusals = refusals(vocab)
        self._drawn = 0

    def draw(self) -> Call | Conversation:
        if self._drawn % BLOCK == 0:
            self._without = frozenset(self._flavors.choice(FLAVORS))
        self._drawn += 1
        draw = self._rng.random()
        for share, make in (
            (EXACT, self._exact), (REFUSED, self._refused), (SESSION, self._session), (LEAVES, self._leaving),
        ):  # fmt: skip
            if draw < share:
                return make()
            draw -= share
        return self._dressed(self._sampled())

    def _exact(self) -> Call:
        return self._dressed(self._rng.choice([c for c in self._cases if c.kind not in self._without]))

    def _refused(self) -> Call:
        path, body = self._rng.choice(self._refusals)
        streams = path in (GENERATE, COMPLETIONS, CHAT) and self._rng.random() < 0.5
        return Call("refused", path, {**body, "stream": True} if streams else body, refused=True)

    def _sampled(self) -> Call:
        """A call that draws its tokens, or greedy ones of a prompt that is new."""
        rng = self._rng
        kinds = greedy_cases((piece(self._texts, rng) + " ",), rng.randrange(1 << 30), 15)
        call = rng.choice([c for c in kinds if c.kind not in self._without])
        body = {**call.body}
        key = {GENERATE: "sampling_params"}.get(call.path, "options" if call.path in OLLAMA else None)
        drawn: dict[str, Any] = {"temperature": rng.choice((0.0, 0.5, 0.8, 1.0, 1.5))}
        filtered = "filters" not in self._without
        if filtered and rng.random() < 0.4:
            drawn["top_p"] = rng.choice((0.5, 0.9, 1.0))
        if filtered and rng.random() < 0.3:
            drawn["top_k"] = rng.choice((1, 20, 300))
        if call.path not in OLLAMA and rng.random() < 0.3:
            drawn["sampling_seed" if call.path == GENERATE else "seed"] = rng.randrange(1 << 30)
        if filtered and call.path == GENERATE and rng.random() < 0.2:
            drawn["min_p"] = 0.05
        if call.path in (COMPLETIONS, CHAT) and rng.random() < 0.3:
            drawn["n"] = 2
        if key is None:
            body.update(drawn)
        else:
            body[key] = {**body[key], **drawn}
        return replace(call, body=body, case=None)

    def _dressed(self, call: Call) -> Call:
        """With an SLO, as a stream or not, read slowly or not: nothing that may change its answer."""
        rng = self._rng
        headers, custom, slo_class = slo_of(rng)
        body = {**call.body, "stream": rng.random() < 0.5}
        if body["stream"] and call.path in (COMPLETIONS, CHAT):
            body["stream_options"] = {"include_usage": True}
        if body["stream"] and call.path in OLLAMA:
            headers, custom, slo_class = {"x-slo-class": UNTOLD}, {}, UNTOLD
        if custom and call.path == GENERATE:
            body["sampling_params"] = {**body["sampling_params"], "custom_params": custom}
        elif custom and call.path in (COMPLETIONS, CHAT):
            body["custom_params"] = custom
        elif custom:
            headers, slo_class = {}, DEFAULT_CLASS
        slow = body["stream"] and rng.random() < SLOW
        return replace(call, body=body, headers=headers, slo_class=slo_class, pause_s=0.1 if slow else 0.0)

    def _leaving(self) -> Call:
        """A call whose client goes away, or that is aborted by its id."""
        rng = self._rng
        end = rng.choice((End.LEFT_EARLY, End.LEFT_AMID, End.ABORTED, End.ABORTED))
        call = self._sampled()
        if end is End.ABORTED or call.path in OLLAMA:
            call = _native("", piece(self._texts, rng), rng, max_new_tokens=LONGEST, ignore_eos=True)
        rid = {"rid": f"soak-{self._name}-{self._drawn}"} if end is End.ABORTED else {}
        body = {**call.body, **rid, "stream": end is End.LEFT_AMID or rng.random() < 0.5}
        if body["stream"] and call.path in (COMPLETIONS, CHAT):
            body["stream_options"] = {"include_usage": True}
        after = rng.randrange(1, 12) if end is End.LEFT_AMID else rng.choice((0.0, 0.005, 0.05, 0.2))
        return replace(
            call, kind=end.value, body=body, headers={"x-slo-class": LEAVING}, slo_class=LEAVING, end=end,
            end_after=after,
        )  # fmt: skip

    def _session(self) -> Conversation:
        rng = self._rng
        turns = [self._dressed(_plain(piece(self._texts, rng)[:60], rng)) for _ in range(rng.randrange(1, 4))]
        short = [
            replace(
                turn, kind="session",
                body={**turn.body, "sampling_params": {**turn.body["sampling_params"], "max_new_tokens": 12}},
            )
            for turn in turns
        ]  # fmt: skip
        return Conversation(tuple(short))

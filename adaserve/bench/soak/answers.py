"""What a server answered, read the same way from every route, whole or streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from adaserve.bench.soak.calls import CHAT, COMPLETIONS, GENERATE, OLLAMA, OLLAMA_CHAT, OLLAMA_GENERATE

DONE = "[DONE]"


@dataclass(slots=True)
class Choice:
    """One generated sequence. None if the route does not say."""

    text: str = ""
    finish: str | None = None  # stop, length or abort
    tokens: int | None = None
    prompt_tokens: int | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    rid: str | None = None


@dataclass(slots=True)
class Answer:
    """All sequences of an answer with status 200."""

    choices: list[Choice] = field(default_factory=list)
    tokens: int | None = None  # output tokens of all choices
    prompt_tokens: int | None = None
    slo_class: str | None = None
    streamed: bool = False
    faults: list[str] = field(default_factory=list)  # what was wrong with the stream itself


def read_whole(path: str, body: Any) -> Answer:
    """Raises KeyError, TypeError, IndexError when the answer lacks what every answer must have."""
    if path == GENERATE:
        items = body if isinstance(body, list) else [body]
        return _native_answer([_native_choice(item) for item in items], items[-1])
    if path in OLLAMA:
        text = body["message"]["content"] if path == OLLAMA_CHAT else body["response"]
        choice = Choice(text, body["done_reason"], body["eval_count"], body["prompt_eval_count"])
        return Answer([choice], choice.tokens, choice.prompt_tokens)
    choices = [
        Choice(
            c["message"]["content"] or "" if path == CHAT else c["text"],
            c["finish_reason"],
            logprobs=_openai_logprobs(c.get("logprobs")),
        )
        for c in sorted(body["choices"], key=lambda c: c["index"])
    ]
    usage, slo = body["usage"], (body.get("metadata") or {}).get("slo")
    return Answer(choices, usage["completion_tokens"], usage["prompt_tokens"], slo and slo["class"])


def _native_choice(item: dict[str, Any]) -> Choice:
    meta = item["meta_info"]
    finish = meta["finish_reason"]
    found = meta.get("output_token_logprobs")
    return Choice(
        item["text"],
        None if finish is None else finish["type"],
        # A request that was aborted while it waited has neither.
        meta.get("completion_tokens"),
        meta.get("prompt_tokens"),
        item.get("output_ids"),
        None if found is None else [entry[0] for entry in found],
        meta["id"],
    )


def _native_answer(choices: list[Choice], last: dict[str, Any]) -> Answer:
    slo = last["meta_info"].get("slo")
    return Answer(
        choices,
        _sum([c.tokens for c in choices]),
        _sum([c.prompt_tokens for c in choices]),
        slo and slo["class"],
    )


def _sum(counts: list[int | None]) -> int | None:
    """None when one is not known."""
    return None if None in counts else sum(c for c in counts if c is not None)


def _openai_logprobs(found: Any) -> list[float] | None:
    if not found:
        return None
    if "content" in found:
        return [entry["logprob"] for entry in found["content"]]
    return list(found["token_logprobs"])


class StreamReader:
    """Puts a stream together, line by line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._choices: dict[int, Choice] = {}
        self._last: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._slo: str | None = None
        self._faults: list[str] = []
        self._ended = False
        self.events = 0

    def line(self, text: str) -> None:
        """Takes one line of the body. Raises ValueError, KeyError, TypeError when it is not an event."""
        if self._path not in OLLAMA:
            if not text.startswith("data:"):
                return
            text = text.removeprefix("data:").strip()
        if not text:
            return
        if self._ended:
            self._faults.append("the stream went on after its end")
        if text == DONE:
            self._ended = True
            return
        event = json.loads(text)
        if "error" in event:
            self._faults.append(f"the stream holds an error: {text[:300]}")
            return
        self.events += 1
        {GENERATE: self._native, OLLAMA_GENERATE: self._ollama, OLLAMA_CHAT: self._ollama}.get(
            self._path, self._openai
        )(event)

    def _native(self, event: dict[str, Any]) -> None:
        index, new = event.get("index", 0), _native_choice(event)
        old = self._choices.get(index)
        if old is not None:
            if (new.tokens or 0) < (old.tokens or 0):
                self._faults.append(f"the tokens went back from {old.tokens} to {new.tokens}")
            if old.finish is not None:
                self._faults.append("an event came after the finish reason")
        self._choices[index], self._last = new, event

    def _ollama(self, event: dict[str, Any]) -> None:
        choice = self._choices.setdefault(0, Choice())
        choice.text += event["message"]["content"] if self._path == OLLAMA_CHAT else event["response"]
        if event["done"]:
            choice.finish, self._ended = event["done_reason"], True

    def _openai(self, event: dict[str, Any]) -> None:
        if event.get("usage"):
            self._usage = event["usage"]
        slo = (event.get("metadata") or {}).get("slo")
        self._slo = slo["class"] if slo else self._slo
        for part in event["choices"]:
            choice = self._choices.setdefault(part["index"], Choice())
            text = part["text"] if self._path == COMPLETIONS else part["delta"].get("content")
            if text and choice.finish is not None:
                self._faults.append("text came after the finish reason")
            choice.text += text or ""
            choice.finish = part["finish_reason"] or choice.finish
            if (more := _openai_logprobs(part.get("logprobs"))) is not None:
                choice.logprobs = [*(choice.logprobs or []), *more]

    def answer(self) -> Answer:
        """What has come. A stream without its end mark is a fault."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        faults = [*self._faults, *([] if self._ended else ["the stream broke off without its end mark"])]
        if self._path == GENERATE and choices:
            made = _native_answer(choices, self._last)
            tokens, prompt_tokens, slo_class = made.tokens, made.prompt_tokens, made.slo_class
        else:
            usage = self._usage or {}
            tokens, prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            slo_class = self._slo
            if self._path not in OLLAMA and self._usage is None:
                faults.append("the stream has no usage")
        return Answer(choices, tokens, prompt_tokens, slo_class, True, faults)

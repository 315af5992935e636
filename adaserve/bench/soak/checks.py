"""What must be true of every answer. Pure functions: a request and what came back in, faults in words out."""

from __future__ import annotations

import json
import re

from adaserve.bench.soak.answers import Answer, Choice
from adaserve.bench.soak.calls import OLLAMA, Call, End

LOGPROB_TOLERANCE = 1e-3


def status_faults(call: Call, status: int, text: str) -> list[str]:
    """An abort before the request ran is answered with an error status; nothing else but refusals may be."""
    if call.refused:
        return [] if status == 400 else [f"status {status} where 400 was expected: {text[:300]}"]
    if status == 200 or (call.end is End.ABORTED and status in (400, 499)):
        return []
    return [f"status {status}: {text[:300]}"]


def answer_faults(call: Call, answer: Answer) -> list[str]:
    """Whether an answer is complete and does what the request asked for."""
    faults = list(answer.faults)
    if len(answer.choices) != call.choices:
        faults.append(f"{len(answer.choices)} sequences where {call.choices} were asked for")
    for choice in answer.choices:
        faults += _choice_faults(call, choice)
    aborted = any(c.finish == "abort" for c in answer.choices)
    untold = aborted or (answer.streamed and call.path in OLLAMA)
    if None in (answer.tokens, answer.prompt_tokens) and not untold:
        faults.append("it does not say how many tokens it has")
    if answer.tokens is not None and not aborted:
        least = len(answer.choices) * int(call.params.get("min_new_tokens") or 1)
        if not least <= answer.tokens <= call.most_tokens:
            faults.append(f"{answer.tokens} tokens where {least} to {call.most_tokens} were expected")
    told = call.path not in OLLAMA and not aborted
    if told and answer.slo_class != call.slo_class:
        faults.append(f"served as class {answer.slo_class!r}, not {call.slo_class!r}")
    return faults


def _choice_faults(call: Call, choice: Choice) -> list[str]:
    faults = []
    accepted = ("stop", "length", *(("abort",) if call.end is End.ABORTED else ()))
    if choice.finish not in accepted:
        faults.append(f"finish reason {choice.finish!r}")
    if choice.finish == "length" and choice.tokens not in (None, call.params["max_new_tokens"]):
        faults.append(f"ended by length after {choice.tokens} tokens")
    if choice.token_ids is not None and len(choice.token_ids) != choice.tokens:
        faults.append(f"{len(choice.token_ids)} token ids for {choice.tokens} tokens")
    if call.body.get("return_logprob") and choice.logprobs is None:
        faults.append("no logprobs")
    if choice.logprobs is not None and choice.tokens not in (None, len(choice.logprobs)):
        faults.append(f"{len(choice.logprobs)} logprobs for {choice.tokens} tokens")
    if choice.finish == "stop":
        faults += _text_faults(call, choice.text)
    return faults


def _text_faults(call: Call, text: str) -> list[str]:
    """A sequence that ended by itself fulfils its grammar."""
    params = call.params
    regex, schema = params.get("regex"), params.get("json_schema")
    if regex is not None and not re.fullmatch(regex, text):
        return [f"{text!r} does not match {regex}"]
    if schema is not None and not _fits(schema, text):
        return [f"{text!r} does not fit the JSON schema"]
    return []


def _fits(schema: str, text: str) -> bool:
    """For schemas of an object without optional properties."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == set(json.loads(schema)["required"])


def differences(answer: Answer, reference: Answer) -> list[str]:
    """How an answer differs from what the unloaded server said without speculation."""
    if len(answer.choices) != len(reference.choices):
        return [f"{len(answer.choices)} sequences, not {len(reference.choices)}"]
    found = []
    for got, right in zip(answer.choices, reference.choices, strict=True):
        if got.text != right.text:
            found.append(f"text {got.text!r}, not {right.text!r}")
        if None not in (got.token_ids, right.token_ids) and got.token_ids != right.token_ids:
            found.append(f"tokens {got.token_ids}, not {right.token_ids}")
        if None not in (got.finish, right.finish) and got.finish != right.finish:
            found.append(f"finish reason {got.finish}, not {right.finish}")
        found += _logprob_differences(got.logprobs, right.logprobs)
    if None not in (answer.tokens, reference.tokens) and answer.tokens != reference.tokens:
        found.append(f"{answer.tokens} tokens, not {reference.tokens}")
    return found


def _logprob_differences(got: list[float] | None, right: list[float] | None) -> list[str]:
    if right is None:
        return []
    if got is None or len(got) != len(right):
        return [f"{None if got is None else len(got)} logprobs, not {len(right)}"]
    # NaN is never close to anything.
    far = [(a, b) for a, b in zip(got, right, strict=True) if not abs(a - b) <= LOGPROB_TOLERANCE]
    return [f"a logprob is {far[0][0]}, not {far[0][1]}"] if far else []


def turn_faults(before: Answer, after: Answer) -> list[str]:
    """A session's turn must have read all that came before it."""
    said = (before.prompt_tokens or 0) + (before.tokens or 0)
    # The last token that was generated is not always part of the next prompt.
    if (after.prompt_tokens or 0) < said - 1:
        return [f"a turn read {after.prompt_tokens} tokens, but {said} had been said before"]
    return []

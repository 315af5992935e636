"""``sampling_params``: every field that a client may set, with what it accepts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from adaserve.boundary import grammar
from adaserve.boundary.errors import RequestError, shown
from adaserve.boundary.limits import (
    INT64_MAX,
    INT64_MIN,
    MAX_LOGIT_BIAS,
    MAX_PARAMS_CHARACTERS,
    MAX_PARAMS_DEPTH,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    Limits,
)
from adaserve.boundary.values import (
    Check,
    absent,
    flag,
    integer,
    is_integer,
    known_fields,
    mapping,
    number,
    one_or_list,
    text,
    token_ids,
)

watermark = absent("ADASERVE draws its own noise; text with a watermark is not served")
_bias = number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def top_p(name: str, value: Any, limits: Limits) -> None:
    """Above 0: SGLang says so itself, but only once the request was tokenized."""
    number(0, 1)(name, value, limits)
    if value == 0:
        raise RequestError(f"{name} must be above 0 and at most 1, got 0")


def stop_token_ids(name: str, value: Any, limits: Limits) -> None:
    """A list of token ids; SGLang skips null among them."""
    if isinstance(value, list | tuple | set) and None in value:
        value = [token for token in value if token is not None]
    token_ids(name, value, limits)


def logit_bias(name: str, value: Any, limits: Limits) -> None:
    """An object from token ids, written as text, to what is added to their logits."""
    mapping(name, value, limits)
    if _are_ids(value, limits.vocab_size) and _are_biases(value.values()):
        return  # mostly in C: the prompts of a batch may have millions
    for key, bias in value.items():
        if not _are_ids([key], limits.vocab_size):
            raise RequestError(
                f"{name} needs keys from 0 to {limits.vocab_size - 1}, written as text without leading "
                f"zeros, got {shown(key)}"
            )
        _bias(f"{name}[{key}]", bias, limits)


def _are_ids(keys: Collection[str], vocab_size: int) -> bool:
    """int() would also take " 1", "1_0", digits of other scripts, and "01" for a token that has a bias."""
    digits = "".join(keys)
    if not (digits.isascii() and digits.isdecimal()) or "" in keys:
        return not keys
    if max(map(len, keys)) > 10 or ("," + ",".join(keys)).count(",0") > ("0" in keys):
        return False
    return max(map(int, keys)) < vocab_size


def _are_biases(values: Collection[Any]) -> bool:
    known = set(map(type, values)) <= {int, float}
    return known and all(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS for value in values)


def min_p(name: str, value: Any, limits: Limits) -> None:
    """A share; not where SGLang's seeded draws have none."""
    number(0, 1)(name, value, limits)
    if limits.seeded and value > 0:
        raise RequestError(
            f"{name} must be 0 on this server, got {value}: with --enable-deterministic-inference SGLang "
            "cannot apply it"
        )


def custom_params(name: str, value: Any, limits: Limits) -> None:
    """An object of JSON values that reaches the scheduler as it is."""
    mapping(name, value, limits)
    depth = 2 if limits.flat_params else MAX_PARAMS_DEPTH
    budget = [MAX_PARAMS_CHARACTERS]
    for key, item in value.items():
        _spend(name, len(key) + 1, budget)
        _plain(f"{name}.{key[:40]}", item, depth - 1, budget)
    thinking = value.get("thinking_budget")
    if thinking is not None:
        integer(-1)(f"{name}.thinking_budget", thinking, limits)


def _plain(name: str, value: Any, depth: int, budget: list[int]) -> None:
    if value is None or isinstance(value, bool | float):
        _spend(name, 1, budget)
    elif isinstance(value, str):
        _spend(name, len(value) + 1, budget)
    elif is_integer(value):
        if not INT64_MIN <= value <= INT64_MAX:
            raise RequestError(f"{name} must be from -2^63 to 2^63 - 1, got {shown(value)}")
        _spend(name, 1, budget)
    elif isinstance(value, dict | list) and depth > 0:
        _spend(name, 1 + len(value), budget)
        for item in value.values() if isinstance(value, dict) else value:
            _plain(name, item, depth - 1, budget)
    elif isinstance(value, dict | list):
        raise RequestError(f"{name} is nested too deeply: this server takes fewer levels")
    else:
        raise RequestError(f"{name} must be a JSON value, got {shown(value)}")


def _spend(name: str, amount: int, budget: list[int]) -> None:
    budget[0] -= amount
    if budget[0] < 0:
        raise RequestError(f"{name}: custom_params may hold at most {MAX_PARAMS_CHARACTERS} characters")


def stop(name: str, value: Any, limits: Limits) -> None:
    """Texts that end the answer, or "" for none. All of them are searched for after every token."""
    if value == "":
        return
    one_or_list(text(MAX_STOP_CHARACTERS, least=1), MAX_STOPS)(name, value, limits)
    if (size := sum(map(len, [value] if isinstance(value, str) else value))) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"{name} may hold at most {MAX_STOP_CHARACTERS} characters in all its entries, got {size}"
        )


def stop_regex(name: str, value: Any, limits: Limits) -> None:
    """Expressions that end the answer, or "" for none."""
    if value != "":
        grammar.stop_regex(name, value, limits)


def without_empty_stops(params: Any) -> Any:
    """Sampling parameters, or a list of them, without a stop or stop_regex of "". SGLang finds "" in every
    text, so the answer would be empty."""
    if isinstance(params, list):
        return [without_empty_stops(item) for item in params]
    empty = [name for name in ("stop", "stop_regex") if params and params.get(name) == ""]
    return {name: value for name, value in params.items() if name not in empty} if empty else params


FIELDS: dict[str, Check] = {
    "max_new_tokens": integer(0),
    "min_new_tokens": integer(0),
    "stop": stop,
    "stop_token_ids": stop_token_ids,
    "stop_regex": stop_regex,
    "temperature": number(0, MAX_TEMPERATURE),
    "top_p": top_p,
    "top_k": integer(1, also=(-1,)),  # more than there are tokens means all of them
    "min_p": min_p,
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(MIN_REPETITION_PENALTY, 2),
    "n": integer(1, MAX_SAMPLES),
    "beam_width": absent("ADASERVE drafts trees and does not serve beam search"),
    "json_schema": grammar.json_schema,
    "regex": grammar.regex,
    "ebnf": grammar.ebnf,
    "structural_tag": grammar.structural_tag,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "ebnf_full_assistant": flag,
    "stream_interval": integer(1),
    "logit_bias": logit_bias,
    "sampling_seed": integer(INT64_MIN, INT64_MAX),
    "custom_params": custom_params,
    "watermark": watermark,
}
"""A name that is not here is refused: SGLang's other fields are its own, such as ``is_normalized``."""


def check_sampling(name: str, params: Any, limits: Limits) -> None:
    """Raises RequestError for what ``SamplingParams`` or the scheduler could not take."""
    known_fields(name, params, limits, FIELDS)
    if params.get("n", 1) is None:  # SGLang reads it before it puts defaults in the place of null
        FIELDS["n"](f"{name}.n", None, limits)
    least, most = params.get("min_new_tokens"), params.get("max_new_tokens")
    if least is not None and most is not None and least > most:
        raise RequestError(f"{name}.min_new_tokens must be at most max_new_tokens ({most}), got {least}")

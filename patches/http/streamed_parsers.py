"""Tool calls and reasoning in a stream are searched for token by token, however many tokens came at once.

Why: SGLang's parsers of streams are made for a token at a time, as a server without speculation sends them.
Where an iteration accepts several, many lose the text before a call, a call's arguments, or the whole call,
and words before the reasoning become part of it. So a client would get something else from the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook, tokenizer_manager


def register() -> None:
    calls = "sglang.srt.function_call"
    hook(f"{calls}.function_call_parser.FunctionCallParser.parse_stream_chunk", _chunk, HookType.AROUND)
    reasoning = "sglang.srt.parser.reasoning_parser.ReasoningParser"
    hook(f"{reasoning}.parse_stream_chunk", _reasoning, HookType.AROUND)
    hook(f"{calls}.json_array_parser.JsonArrayParser.parse_streaming_increment", _increment, HookType.AROUND)


def _chunk(original: Callable[[Any, str], tuple[str, list[Any]]], self: Any, chunk_text: str) -> Any:
    """Of a text in the format of the model."""
    text, calls = "", []
    for token in _tokens(chunk_text):
        normal, found = original(self, token)
        text += normal or ""
        calls += found
    return text, calls


def _reasoning(original: Callable[[Any, str], tuple[str, str]], self: Any, chunk_text: str) -> Any:
    told = [original(self, token) for token in _tokens(chunk_text)]
    return "".join(thought or "" for thought, _ in told), "".join(text or "" for _, text in told)


def _increment(original: Callable[[Any, str, Any], Any], self: Any, new_text: str, tools: Any) -> Any:
    """Of calls that a grammar has made a JSON array, as ``tool_choice`` may demand."""
    first, *rest = _tokens(new_text)
    result = original(self, first, tools)
    for token in rest:
        more = original(self, token, tools)
        result.normal_text = (result.normal_text or "") + (more.normal_text or "")
        result.calls = [*result.calls, *more.calls]
    return result


def _tokens(text: str) -> list[str]:
    """All of ``text`` as one, where the tokenizer cannot say where its tokens begin: a slow one."""
    tokenizer = tokenizer_manager().tokenizer
    if not getattr(tokenizer, "is_fast", False):
        return [text]
    return split(tokenizer.backend_tokenizer, text)


def split(tokenizer: Any, text: str) -> list[str]:
    """The texts of the tokens of ``text``; one that is empty for an empty text. ``tokenizer``: of the package
    tokenizers. Tokens that share a character stay together."""
    starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
    cuts = sorted({0, *starts, len(text)})
    return [text[at:end] for at, end in pairwise(cuts)] or [text]

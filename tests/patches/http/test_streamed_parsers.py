"""A stream's tool calls and reasoning are the same however many tokens come at once."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from adaserve.patches.http.streamed_parsers import _chunk, _increment, _reasoning, _tokens
from tests.engine.pairs import save_tokenizer

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    for name in ("add", "find")
]
ADD, FIND = '{"k": 3, "of": [1, 2]}', '{"city": "Zürich, \\"N\\""}'
CALLS = [("add", ADD), ("find", FIND)]


def mark(name: str) -> str:
    """A token of DeepSeek's."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


TEXTS = {
    "qwen25": "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in CALLS
    ),
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{given}<|tool_call_end|>"
        for i, (name, given) in enumerate(CALLS)
    )
    + "<|tool_calls_section_end|>",
    "deepseekv31": mark("tool calls begin")
    + "".join(
        f"{mark('tool call begin')}{name}{mark('tool sep')}{given}{mark('tool call end')}"
        for name, given in CALLS
    )
    + mark("tool calls end"),
}
"""By parser: what a model writes behind some words, to call both tools."""
ARRAY = f'[{{"name": "add", "parameters": {ADD}}}\n, \n{{"name": "find", "parameters": {FIND}}}]'
THOUGHTS = {
    "Well,<think>it is 4.</think> It is 4.": ("it is 4.", "Well, It is 4."),
    "<think>I ask <tool_call>\nfor it": ("I ask ", "<tool_call>\nfor it"),
    "<think>I ask <tool_call> for it</think> Done.": ("I ask ", "<tool_call> for it</think> Done."),
}
"""What is thought, and what is said; a call ends the thought, as long as the end of it has not come."""
MARKS = sorted({found for text in (*TEXTS.values(), *THOUGHTS) for found in re.findall("<[^<>]+>", text)})


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(MARKS)
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=tokenizer))
    monkeypatch.setattr(http_server, "_global_state", state)
    return tokenizer


def chunks(tokens: Sequence[str], rng: random.Random) -> Iterator[str]:
    """What iterations of one to twelve tokens bring."""
    left = list(tokens)
    while left:
        count = rng.randint(1, 12)
        yield "".join(left[:count])
        del left[:count]


def native(parser: str, parts: Sequence[str]) -> tuple[str, dict[int, tuple[str, str]]]:
    made = FunctionCallParser(TOOLS, parser)
    told = [_chunk(FunctionCallParser.parse_stream_chunk, made, part) for part in parts]
    return joined([*told, made.parse_stream_end()])


def constrained(parts: Sequence[str]) -> tuple[str, dict[int, tuple[str, str]]]:
    made = JsonArrayParser()
    told = [_increment(JsonArrayParser.parse_streaming_increment, made, part, TOOLS) for part in parts]
    return joined([(one.normal_text, one.calls) for one in [*told, made.finish(TOOLS)]])


def joined(told: Sequence[tuple[str, list[Any]]]) -> tuple[str, dict[int, tuple[str, str]]]:
    """As a client puts a stream together: all text, and name and arguments of each call."""
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for _, found in told for call in found):
        name, given = calls.get(call.tool_index, ("", ""))
        calls[call.tool_index] = (name + (call.name or ""), given + (call.parameters or ""))
    return "".join(text or "" for text, _ in told), calls


@pytest.mark.parametrize("parser", TEXTS)
@pytest.mark.parametrize("seed", range(8))
def test_calls_in_a_models_own_format(parser: str, seed: int) -> None:
    tokens = _tokens("Zürich it is." + TEXTS[parser])
    text, calls = native(parser, list(chunks(tokens, random.Random(seed))))
    assert (text, calls) == native(parser, tokens)
    assert text.strip() == "Zürich it is." and list(calls.values()) == CALLS


@pytest.mark.parametrize("seed", range(8))
def test_calls_that_a_grammar_has_made(seed: int) -> None:
    tokens = _tokens(ARRAY)
    text, calls = constrained(list(chunks(tokens, random.Random(seed))))
    assert (text, calls) == constrained(tokens)
    assert list(calls.values()) == CALLS


@pytest.mark.parametrize("text", THOUGHTS)
def test_reasoning_and_what_stands_before_it(text: str) -> None:
    def told(parts: Sequence[str]) -> tuple[str, str]:
        made = ReasoningParser("qwen3")
        thought, said = zip(
            *(_reasoning(ReasoningParser.parse_stream_chunk, made, part) for part in parts), strict=True
        )
        return "".join(thought), "".join(said)

    tokens = _tokens(text)
    assert told(tokens) == THOUGHTS[text]
    for parts in ([text], *(list(chunks(tokens, random.Random(seed))) for seed in range(8))):
        assert told(parts) == THOUGHTS[text]


@pytest.mark.parametrize("text", ["", "a", "Zürich 😀<tool_call>\n\n ", TEXTS["qwen25"]])
def test_tokens_are_all_of_the_text(tokenizer: Any, text: str) -> None:
    tokens = _tokens(text)
    assert "".join(tokens) == text
    assert len(tokens) <= max(1, len(tokenizer.encode(text)))


def test_a_tokenizer_that_knows_no_places_leaves_a_chunk_whole(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    slow = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=SimpleNamespace(is_fast=False)))
    monkeypatch.setattr(http_server, "_global_state", slow)
    assert _tokens("a b<tool_call>") == ["a b<tool_call>"]

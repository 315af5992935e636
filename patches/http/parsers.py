"""Gives up on a text whose tool calls or reasoning take long to find, and refuses tools that take long to
check.

Why: SGLang's parsers search with regular expressions whose time grows with the square of the text, in the
HTTP event loop: 44 KB of ``<tool_call>`` take half a second, a body of 32 MB days, and nobody else is
answered. ``/parse_function_call`` and ``/separate_reasoning`` take any text; with --tool-call-parser what a
model was made to write is searched as well. The matcher looks for signals, so a timer can end it. JSON in
such a text may be nested more deeply than Python reads it.

SGLang checks every schema of a chat's tools in Python, at 0.26 ms a property and as long for a choice: one
body of 0.3 MB held up everybody's tokens for 6 s. It finds nothing wrong with a schema that is true or false,
and then fails on it (500).

``/parse_function_call`` hands over tools of a type that lacks what one of the parsers reads (500). On
``/v1/messages`` SGLang takes arguments that are no JSON for none, and fails on JSON that is no object (500).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.checked import shown
from adaserve.patches import hook

PATIENCE_S = 1.0
"""Of processor time, so that a busy host ends nobody's request."""


TEXT = "the text was not parsed: finding tool calls or reasoning in it"
TOOLS = "tools are refused, send fewer or smaller ones: checking their schemas"


class _GivenUpError(BaseException):
    """Not an Exception: parsers catch these to go on."""


def register() -> None:
    calls = "sglang.srt.function_call.function_call_parser.FunctionCallParser"
    reasoning = "sglang.srt.parser.reasoning_parser.ReasoningParser"
    for parse in (
        f"{calls}.parse_non_stream",
        f"{calls}.parse_stream_chunk",
        f"{reasoning}.parse_non_stream",
        f"{reasoning}.parse_non_stream_blocks",
    ):
        hook(parse, _limited, HookType.AROUND)
    hook(f"{calls}.__init__", _complete_tools, HookType.AROUND)
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._validate_request"
    hook(chat, _checked, HookType.AROUND)
    messages = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_response"
    hook(messages, _objects_only, HookType.BEFORE)


def _checked(original: Callable[..., str | None], self: Any, request: Any) -> str | None:
    """What is wrong with a chat; also for the routes that make one of their requests."""
    try:
        with _interruptible(TOOLS):
            return original(self, request) or _no_objects(request.tools)
    except RequestError as error:
        return str(error)


def _no_objects(tools: Any) -> str | None:
    names = [tool.function.name for tool in tools or () if isinstance(tool.function.parameters, bool)]
    return f"tools: the parameters of {shown(names[0])} must be a JSON schema, an object" if names else None


def _complete_tools(original: Callable[..., None], self: Any, tools: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.managers import io_struct

    def complete(tool: Any) -> Any:
        if not isinstance(tool, io_struct.Tool):
            return tool
        f = tool.function
        fields = {"name": f.name, "description": f.description, "parameters": f.parameters}
        return Tool.model_validate({"type": tool.type, "function": fields})

    original(self, [complete(tool) for tool in tools], *args, **kwargs)


def _objects_only(_: Any, response: Any) -> None:
    """``response``: the chat completion that is made a message."""
    for choice in response.choices:
        for call in choice.message.tool_calls or ():
            if not (call.function.arguments or "").lstrip().startswith("{"):
                call.function.arguments = ""


def _limited(parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with _interruptible():
            return parse(*args, **kwargs)
    except RecursionError as error:
        raise RequestError("the text was not parsed: its contents are nested too deeply") from error


@contextmanager
def _interruptible(what: str = TEXT) -> Iterator[None]:
    """Raises RequestError where ``what`` is done meanwhile takes too long. In the main thread only, which has
    the event loop; signals go nowhere else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        yield
    except _GivenUpError:
        raise RequestError(f"{what} takes more than {PATIENCE_S:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, heeded)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise _GivenUpError

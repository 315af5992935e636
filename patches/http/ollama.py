"""Ollama's routes: refusals, the ends of answers, and options with their meanings.

Why: SGLang catches no refusal on these routes, says of all answers that they ended by themselves, leaves out
the text that comes with a stream's end, and passes options on under names that its sampling parameters do not
have.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary.wording import as_sent
from adaserve.patches import hook
from adaserve.patches.http.stream_starts import start
from adaserve.patches.http.validation import STARTED


def register() -> None:
    ollama = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
    for answer in ("_generate_chat_response", "_generate_generate_response"):
        hook(f"{ollama}.{answer}", _ollama, HookType.AROUND)
    for answer in ("_stream_chat_response", "_stream_generate_response"):
        hook(f"{ollama}.{answer}", _ollama_stream, HookType.AROUND)
    hook(f"{ollama}._convert_options_to_sampling_params", _ollama_options, HookType.AFTER)


async def _ollama(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any, *rest: Any
) -> Any:
    last = dict[str, Any]()
    try:
        setattr(obj, STARTED, _noted(self.tokenizer_manager.generate_request(obj, request), last))
        answer = await original(self, obj, request, *rest)
    except ValueError as error:
        return _ollama_refusal(obj, error)
    answer.done_reason = _why_done(last)
    return answer


async def _noted(outputs: AsyncIterator[Any], last: dict[str, Any]) -> AsyncIterator[Any]:
    """Runs when SGLang asks for it, which measures how long that takes. ``last`` becomes the last output."""
    async for out in outputs:
        last.update(out)
        yield out


def _ollama_refusal(obj: Any, error: ValueError) -> Any:
    prompt = "messages" if obj.text is None else "prompt"
    told = as_sent(str(error), (), ("num_predict", "seed", "repeat_penalty", prompt))
    return JSONResponse({"error": told}, HTTPStatus.BAD_REQUEST)


def _why_done(output: Any) -> str:
    """Of the last output: SGLang says ``stop`` of an answer that was cut, too."""
    return "length" if output["meta_info"]["finish_reason"]["type"] == "length" else "stop"


async def _ollama_stream(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any, *rest: Any
) -> Any:
    manager, last = self.tokenizer_manager, dict[str, Any]()
    try:
        await start(manager, obj, request)
    except ValueError as error:
        return _ollama_refusal(obj, error)
    outputs = _text_before_the_end(vars(obj)[STARTED], not manager.incremental_streaming_output, last)
    setattr(obj, STARTED, outputs)
    response = await original(self, obj, request, *rest)
    response.body_iterator = _with_the_end(response.body_iterator, last)
    return response


async def _text_before_the_end(
    outputs: AsyncIterator[Any], repeated: bool, last: dict[str, Any]
) -> AsyncIterator[Any]:
    """What SGLang's streams for Ollama are made of. They leave the text of the last output out, and take each
    output for all of the text so far. ``repeated``: whether it is, rather than what is new. ``last`` becomes
    the last output."""
    text = ""
    async with aclosing(outputs):  # type: ignore[type-var]
        async for out in outputs:
            text = out.get("text", "") if repeated else text + out.get("text", "")
            if out["meta_info"].get("finish_reason") is not None:
                yield {**out, "text": text, "meta_info": {**out["meta_info"], "finish_reason": None}}
                last.update(out)
            yield {**out, "text": text}


async def _with_the_end(lines: AsyncIterator[bytes], last: dict[str, Any]) -> AsyncIterator[bytes]:
    """The last line also says why the stream ended, and counts tokens, as that of a whole answer does."""
    async for line in lines:
        if not last:
            yield line
            continue
        counts = last["meta_info"]
        end = {
            "done_reason": _why_done(last),
            "prompt_eval_count": counts.get("prompt_tokens"),
            "eval_count": counts.get("completion_tokens"),
        }
        yield json.dumps(json.loads(line) | end).encode() + b"\n"


def _ollama_options(params: dict[str, Any], self: Any, options: Any = None) -> None:
    """SGLang passes on what its sampling parameters call otherwise: a ``seed``, and the
    ``num_predict`` of -1 or -2, which is as many tokens as fit. It leaves out what it could pass on. Its
    penalty looks at all of the text, Ollama's at the last ``repeat_last_n`` tokens: none of them with 0."""
    options = options or {}
    if "min_p" in options:
        params["min_p"] = options["min_p"]
    if "repeat_penalty" in options and options.get("repeat_last_n") != 0:
        params["repetition_penalty"] = options["repeat_penalty"]
    if "seed" in params:
        params["sampling_seed"] = params.pop("seed")
    if params.get("max_new_tokens") in (-1, -2):
        params["max_new_tokens"] = None

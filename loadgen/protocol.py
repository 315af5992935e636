"""Request bodies and stream events of the three HTTP APIs: completions, chat, SGLang's generate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.slo.replay_lengths import ANSWER_TOKENS
from adaserve.slo.resolve import (
    HEADER_CLASS,
    HEADER_TPOT,
    HEADER_TRACE,
    HEADER_TTFT,
    TRACE_KEYS,
    TRACE_MEMBER,
)
from adaserve.slo.run_summary import PREDICTED

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
MAX_COUNT = 10**9
"""No answer has this many tokens; a larger number would not fit into a float."""
_BROKEN_OFF = ("abort", "error")
"""Finish reasons of SGLang and vLLM for an answer that is not whole."""
NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Raised for an event of another form."""


@dataclass(slots=True)
class StreamEvent:
    """What one SSE event says."""

    text: str = ""  # new text
    finish_reason: str | None = None
    output_tokens: int | None = None  # generated so far, where the event tells
    prompt_tokens: int | None = None
    accept_length: float | None = None  # tokens per verification forward
    server_slo: dict[str, Any] | None = None  # the verdict of an AdaServe server
    error: str | None = None


def body(server: Endpoint, request: PlannedRequest, history: str) -> dict[str, Any]:
    """The JSON body. ``history``: text of earlier turns, put before the prompt."""
    data = _body(server, request, history)
    if request.priority is not None:
        data["priority"] = request.priority
    if request.answer_tokens is not None:
        holder = data["sampling_params"] if server.api == "generate" else data
        holder["custom_params"] = {ANSWER_TOKENS: request.answer_tokens}
    return data


def _body(server: Endpoint, request: PlannedRequest, history: str) -> dict[str, Any]:
    if server.api == "generate":
        sampling = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": server.ignore_eos,
        }
        return {"text": history + request.prompt, "sampling_params": sampling, "stream": True}
    options: dict[str, Any] = {"include_usage": True}
    if server.continuous_usage:
        options["continuous_usage_stats"] = True
    data: dict[str, Any] = {
        "model": server.model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": options,
    }
    if server.ignore_eos:
        data["ignore_eos"] = True
    if server.api == "chat":
        return data | {"messages": [{"role": "user", "content": history + request.prompt}]}
    return data | {"prompt": history + request.prompt}


def slo_headers(server: Endpoint, request: PlannedRequest) -> dict[str, str]:
    """The SLO of a request as HTTP headers: ``x-slo-*``, and ``tracestate`` for routers that drop those.
    Raises LoadgenError."""
    headers: dict[str, str] = {}
    if server.slo_headers in ("both", "class"):
        if not request.slo_class.isascii():
            raise LoadgenError(
                f"the class {request.slo_class!r} does not fit into a header: rename it, or give "
                "--slo-headers ms"
            )
        headers[HEADER_CLASS] = request.slo_class
    if server.slo_headers in ("both", "ms"):
        if request.tpot_ms is not None:
            headers[HEADER_TPOT[0]] = f"{request.tpot_ms:.6g}"
        if request.ttft_ms is not None:
            headers[HEADER_TTFT[0]] = f"{request.ttft_ms:.6g}"
    members = [f"{key}:{headers[name]}" for key, name in TRACE_KEYS.items() if name in headers]
    own = any(name.lower() == HEADER_TRACE for name in server.headers)
    if members and not own and not re.search(r"[,;=]", request.slo_class):
        headers[HEADER_TRACE] = f"{TRACE_MEMBER}={';'.join(members)}"
    return headers


def parse_event(api: str, data: Mapping[str, Any], seen: int) -> StreamEvent:
    """Reads one event. ``seen``: characters of text so far (``generate`` repeats the whole text).

    Raises NOT_UNDERSTOOD for an event of another form."""
    if data.get("error") or data.get("object") == "error":
        return StreamEvent(error=error_text(data))
    if api == "generate":
        return _checked(_parse_generate(data, seen))
    event = StreamEvent()
    choices = data.get("choices") or ()
    if choices:
        choice = choices[0]
        event.text = choice.get("text") or _delta_text(choice.get("delta")) or ""
        event.finish_reason = choice.get("finish_reason")
        if event.finish_reason in _BROKEN_OFF:
            return StreamEvent(error=f"the server ended the answer: {event.finish_reason}")
    usage = data.get("usage")
    if usage:
        event.output_tokens = usage.get("completion_tokens")
        event.prompt_tokens = usage.get("prompt_tokens")
    event.server_slo = _verdict(data.get("metadata"))
    return _checked(event)


def _checked(event: StreamEvent) -> StreamEvent:
    """Refuses bad values that would otherwise be noticed only when the record is judged, or never."""
    for value in (event.output_tokens, event.prompt_tokens):
        _count(value)
    if not isinstance(event.text, str) or not isinstance(event.finish_reason, str | None):
        raise TypeError("text or finish_reason is not a string")
    return event


def _count(value: Any) -> int | None:
    """Checks a number of tokens. Raises ValueError."""
    if value is not None and (not isinstance(value, int) or not 0 <= value <= MAX_COUNT):
        raise ValueError("a token count is not a valid number")
    return value


def _verdict(metadata: Any) -> dict[str, Any] | None:
    """``slo`` of a response's metadata: times in ms or None, and whether the SLO was met. The TPOT that was
    predicted is there if the server told it."""
    told = metadata.get("slo") if isinstance(metadata, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(told.get("met"), bool):
        return None
    times = {k: told.get(k) for k in ("tpot_ms", "tpot_slo_ms", "ttft_ms", "ttft_slo_ms")}
    if told.get(PREDICTED) is not None:
        times[PREDICTED] = told[PREDICTED]
    if not all(v is None or (isinstance(v, int | float) and math.isfinite(v)) for v in times.values()):
        return None
    return {**times, "met": told["met"]}


def _delta_text(delta: Mapping[str, Any] | None) -> str:
    if not delta:
        return ""
    # vLLM has renamed the reasoning; servers that send both names send the same text twice.
    text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
    text += delta.get("refusal") or ""
    # One call has this form in OpenAI's older API.
    for call in (*(delta.get("tool_calls") or ()), {"function": delta.get("function_call")}):
        function = call.get("function") or {}
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _parse_generate(data: Mapping[str, Any], seen: int) -> StreamEvent:
    meta = data.get("meta_info") or {}
    reason = meta.get("finish_reason")
    detail = reason if isinstance(reason, Mapping) else {"type": reason}
    kind = detail.get("type")
    if kind == "abort":
        return StreamEvent(error=f"aborted: {detail.get('message', '')}".strip(": "))
    verifications, tokens = _count(meta.get("spec_verify_ct")), _count(meta.get("completion_tokens"))
    return StreamEvent(
        text=data.get("text", "")[seen:],
        finish_reason=kind,
        output_tokens=tokens,
        prompt_tokens=meta.get("prompt_tokens"),
        server_slo=_verdict(meta),
        # The first token comes from the prefill, not from a verification.
        accept_length=(tokens - 1) / verifications if tokens and verifications else None,
    )


def error_text(data: Mapping[str, Any]) -> str:
    error = data.get("error", data)
    if isinstance(error, Mapping):
        error = error.get("message") or error
    return " ".join(str(error).split())[:300] or "error without a message"

"""Per-request SLOs at the HTTP boundary: headers, body and class become one entry of ``custom_params``.

Why: SGLang knows no SLOs. ``custom_params`` is the one body field that travels to the scheduler
unchanged. Requests are checked before anything is queued or streamed, because an error raised
inside a stream would come after status 200. Every request passes ``TokenizerManager.generate_request``;
the two routes above it answer with the status themselves, and know the body's ``nvext``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary.limits import MAX_BATCH
from adaserve.config import slo_classes
from adaserve.patches import hook
from adaserve.patches.http.stream_starts import native_response
from adaserve.patches.http.validation import asks_for_health, refusal
from adaserve.slo.classes import SLOError
from adaserve.slo.resolve import START_PARAMS, START_TEXT, FromHeaders, read_headers


def register() -> None:
    openai = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"
    hook(openai, _openai_request, HookType.AROUND)
    hook("sglang.srt.entrypoints.http_server.serve_generate_request", _native_request, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
    hook(manager, _any_request, HookType.BEFORE)
    responses = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
    hook(f"{responses}._generate_with_builtin_tools", _response, HookType.BEFORE)


async def _openai_request(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any
) -> Any:
    if "custom_params" in type(request).model_fields:
        try:
            nvext = (await raw_request.json()).get("nvext")
            slo = _headers(raw_request).resolve(request.custom_params, slo_classes(), nvext)
            request.custom_params = slo.in_params(request.custom_params)
            _prioritize(request, {slo.priority})
        except SLOError as error:
            return self.create_error_response(message=str(error), err_type="BadRequest", status_code=400)
        raw_request.state.adaserve_resolved = True
    return await original(self, request, raw_request)


async def _native_request(original: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    try:
        _attach(obj, request, (await request.json()).get("nvext"))
    except SLOError as error:
        return refusal(str(error))
    request.state.adaserve_resolved = True
    return await native_response(original, obj, request)


def _any_request(self: Any, obj: Any, request: Any = None) -> None:
    """Also for ``sgl.Engine``: raises SLOError, a ValueError, before the request is queued."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    resolved = request is not None and getattr(request.state, "adaserve_resolved", False)
    if isinstance(obj, GenerateReqInput) and not resolved and not asks_for_health(request):
        _attach(obj, request)


def _response(
    self: Any,
    request_id: str,
    prompt: Any,
    adapted: Any,
    *_: Any,
    raw_request: Any = None,
    priority: int | None = None,
    **__: Any,
) -> None:
    """SGLang does not hand on the priority of a response's body. Where none was sent ``priority`` is 0.

    Raises SLOError for a response in the background, which runs after its status is sent.
    """
    if "priority" in getattr(raw_request, "_json", ()):
        adapted.priority = priority
    if adapted.background:
        _headers(raw_request).resolve(None, slo_classes(), None)


def _attach(obj: Any, request: Any, nvext: Any = None) -> None:
    """``obj``: a GenerateReqInput, with the sampling parameters of one request or of a batch."""
    given = obj.sampling_params
    if isinstance(given, list) and len(given) > MAX_BATCH:
        return  # the boundary refuses it
    headers, priorities = _headers(request), set[int | None]()
    is_first = _is_first(obj)

    def resolved(params: Any) -> Any:
        if params is not None and not isinstance(params, dict):
            return params  # SGLang says what is wrong with it
        params = params or {}
        custom = params.get("custom_params")
        if custom is not None and not isinstance(custom, dict):
            return params  # the boundary says what is wrong with it
        slo = headers.resolve(custom, slo_classes(), nvext)
        priorities.add(slo.priority)
        if is_first and not slo.stated:
            slo = replace(slo, counted=False)
        return {**params, "custom_params": slo.in_params(custom)}

    obj.sampling_params = [resolved(p) for p in given] if isinstance(given, list) else resolved(given)
    _prioritize(obj, priorities)


def _is_first(obj: Any) -> bool:
    """Whether a request is that of SGLang's own with which a server starts."""
    texts = obj.text if isinstance(obj.text, list) else [obj.text]
    return obj.sampling_params == START_PARAMS and all(text == START_TEXT for text in texts)


def _headers(request: Any) -> FromHeaders:
    """Read once, however many prompts a request has. Raises SLOError."""
    raw = [] if request is None else request.headers.raw
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
    return read_headers(pairs, slo_classes())


def _prioritize(obj: Any, hinted: set[int | None]) -> None:
    """SGLang's own field for it is used, and wins when the request has set it. Raises SLOError."""
    if len(hinted) > 1:
        raise SLOError(
            "the requests of a batch share one priority: give all the same nvext.agent_hints.priority"
        )
    if hinted and getattr(obj, "priority", None) is None:
        obj.priority = hinted.pop()

"""Every request is checked before it is queued, on every route, and a refusal is always HTTP 400.

Why: SGLang passes on what ends its scheduler, and with it the server for everybody: token ids outside the
vocabulary, counts beyond 32 bits, prompts without a token, and more (``adaserve.boundary``). All routes and
``sgl.Engine`` meet in ``TokenizerManager.generate_request``: there the fields are checked before SGLang
looks at them, and the prompt once it is tokenized.

A server that was told to stop waits until no request is left. SGLang takes new ones meanwhile, so it goes on
for as long as somebody sends any. Here they get 503.

A stream's status is sent before its first output. Here all routes wait for it, so that a refusal is a status
and not an event in a good answer: also where the scheduler refuses, as a full queue or a grammar that cannot
be compiled, which chat and completions make an event of.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sglang.srt.observability.req_time_stats import monotonic_time
from sglang.srt.plugins.hook_registry import HookType

from adaserve.asgi import route_path
from adaserve.boundary import (
    OF_MEDIA,
    Limits,
    RequestError,
    check_all_logprobs,
    check_logprobs,
    check_prompt,
    check_request,
)
from adaserve.boundary.prompts import require_few
from adaserve.boundary.values import identifier, integer, token_ids
from adaserve.boundary.wording import as_sent, wrong_fields
from adaserve.patches import hook, tokenizer_manager
from adaserve.slo.ledger import HEALTH_CHECK

_FIRST = "_adaserve_started"
"""Where a request object keeps its outputs once they were started ahead of the response."""

BELIEVED_DELAY_S = 1.0
"""How long ago a request may say that it came."""

KEPT_OUTPUT_TOKENS = 2
"""That SGLang takes off what a client of /v1/responses asks for; it would refuse 1 as -1."""

STOPPING = "this server is stopping: send the request to another one, or once more when it is back"

HEALTH_ROUTES = ("/health", "/health_generate")

_repeats: ContextVar[bool] = ContextVar("adaserve_repeats", default=False)
"""Whether the request at hand is a stream whose outputs hold all that came before them, as on ``/generate``.
The other routes send what is new."""

_logprobs: ContextVar[list[int]] = ContextVar("adaserve_logprobs")
"""Log probabilities that the prompts so far of the request at hand ask for, in its one entry: all tasks that
serve the request count in it."""


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.generate_request", _every_request, HookType.AROUND)
    hook(f"{manager}._validate_one_request", _check_tokens, HookType.BEFORE)
    for call in ("open_session", "close_session"):
        hook(f"{manager}.{call}", _check_session_id, HookType.BEFORE)
    ollama = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
    for answer in ("_generate_chat_response", "_generate_generate_response"):
        hook(f"{ollama}.{answer}", _ollama, HookType.AROUND)
    for answer in ("_stream_chat_response", "_stream_generate_response"):
        hook(f"{ollama}.{answer}", _ollama_stream, HookType.AROUND)
    hook(f"{ollama}._convert_options_to_sampling_params", _ollama_options, HookType.AFTER)
    openai = "sglang.srt.entrypoints.openai"
    chat = f"{openai}.serving_chat.OpenAIServingChat._convert_to_internal_request"
    hook(chat, _keep_converted, HookType.AFTER)
    for serving in ("serving_chat.OpenAIServingChat", "serving_completions.OpenAIServingCompletion"):
        hook(f"{openai}.{serving}._handle_streaming_request", _openai_stream, HookType.AROUND)
    messages = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming"
    hook(messages, _messages_stream, HookType.AROUND)
    responses = f"{openai}.serving_responses.OpenAIServingResponses"
    hook(f"{responses}._generate_with_builtin_tools", _keep_made, HookType.BEFORE)
    hook(f"{responses}.create_responses", _responses_stream, HookType.AROUND)
    hook(f"{responses}._make_request", _without_a_traceback, HookType.AROUND)
    hook(f"{responses}.responses_full_generator", _responses_status, HookType.AROUND)
    detokenize = f"{openai}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request"
    hook(detokenize, _detokenize, HookType.AROUND)
    hook("sglang.srt.entrypoints.api_contract.generate_contract_error", _name_the_field, HookType.AROUND)


def _every_request(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Also for ``sgl.Engine``: raises RequestError, a ValueError, before anything is queued."""
    outputs: AsyncIterator[Any] | None = vars(obj).pop(_FIRST, None)
    if outputs is not None:
        return outputs
    if self.gracefully_exit:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, STOPPING)
    check_fields(self, obj, request)
    return original(self, obj, request)


def _limits(manager: Any, of_tools: bool = False) -> Limits:
    """What the server of this tokenizer manager can take."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_observability

    return Limits(
        manager.model_config.vocab_size,
        flat_params=not envs.SGLANG_USE_PICKLE_IPC.get(),
        takes_media=manager.mm_processor is not None,
        seeded=bool(manager.server_args.enable_deterministic_inference),
        labels=frozenset(get_observability().tokenizer_metrics_allowed_custom_labels or ()),
        of_tools=of_tools,
    )


def check_fields(manager: Any, obj: Any, request: Any) -> None:
    """Raises RequestError for what a request may not hold. ``obj``: SGLang's request, not normalized yet."""
    if not hasattr(obj, "token_ids_logprob"):
        if manager.is_generation and not asks_for_health(request):
            raise RequestError("this server generates text: embeddings, rewards and classes are not served")
        return
    _logprobs.set([0])
    limits = _limits(manager, _grammar_of_tools(obj, request))
    check_request(vars(obj), limits)
    require_readable(obj.custom_logit_processor)
    obj.received_time = arrival(obj.received_time, monotonic_time())
    if not limits.takes_media:
        for name in OF_MEDIA:
            setattr(obj, name, None)
    rids = obj.rid if isinstance(obj.rid, list | tuple) else [obj.rid]
    if not asks_for_health(request) and any(rid and rid.startswith(HEALTH_CHECK) for rid in rids):
        raise RequestError(f"rid must not start with {HEALTH_CHECK}: SGLang's own health checks do")


def require_readable(processors: Any) -> None:
    """Of custom logit processors, where clients may send any: they are code, pickled, and what cannot be read
    ends the scheduler. Raises RequestError."""
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    if processors is None or not get_exec().features.enable_custom_logit_processor:
        return
    for processor in filter(None, processors if isinstance(processors, list) else [processors]):
        try:
            CustomLogitProcessor.from_str(processor)
        except Exception as error:
            raise RequestError(f"custom_logit_processor cannot be read: {error!r}") from error


def arrival(stated: float | None, now: float) -> float:
    """When a request came, by the server's clock. OpenAI routes stamp it before they make the prompt; a body
    for /generate may state anything. TTFT, order and admission follow from it, so neither can move it far."""
    return now if stated is None else min(max(stated, now - BELIEVED_DELAY_S), now)


def asks_for_health(request: Any) -> bool:
    """Whether a request of SGLang's own comes from a health check, whose other headers mean nothing."""
    return request is not None and route_path(request.scope) in HEALTH_ROUTES


def _check_session_id(self: Any, obj: Any, request: Any = None) -> None:
    """SGLang logs it, and keeps it as long as the session is open."""
    if obj.session_id is not None:
        identifier("session_id", obj.session_id, _limits(self))


def _check_tokens(self: Any, obj: Any, input_ids: Any) -> None:
    """Each prompt of a request, tokenized; runs before anything of it was sent."""
    if input_ids is not None:
        continues = bool(getattr(obj, "session_params", None))
        check_prompt(len(input_ids), getattr(obj, "logprob_start_len", None), continues)
        if getattr(obj, "return_logprob", None):
            _check_logprobs(obj, len(input_ids), self.model_config.context_len)


def _check_logprobs(obj: Any, prompt: int, context: int) -> None:
    """``obj``: one normalized request of ``prompt`` tokens. Only the scheduler knows what came before them in
    a session, so where the prompt's log probabilities are asked for, prompt and answer fill the context."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    start = obj.logprob_start_len
    asked = obj.sampling_params.get("max_new_tokens", SamplingParams().max_new_tokens)
    of_prompt = start is not None and start >= 0
    after_others = of_prompt and bool(getattr(obj, "session_params", None))
    if after_others:
        prompt = context
    told = max(0, prompt - start) if of_prompt else 0
    left = max(0, context - prompt)
    new = left if asked is None else min(asked, left)
    each = 1 + (obj.top_logprobs_num or 0) + len(obj.token_ids_logprob or ())
    held = check_logprobs(told, new, each, repeated=_repeats.get(), after_others=after_others)
    so_far = _logprobs.get([0])
    so_far[0] += held * (obj.sampling_params.get("n") or 1)
    check_all_logprobs(so_far[0])


async def start(manager: Any, obj: Any, request: Any) -> None:
    """Runs a request up to its first output. Raises ValueError or HTTPException when it is refused."""
    outputs = manager.generate_request(obj, request)
    first = await anext(outputs)
    try:
        _raise_refusal(first)
    except HTTPException:
        await outputs.aclose()
        raise

    async def all_of_it() -> AsyncIterator[Any]:
        try:
            yield first
            async for out in outputs:
                yield out
        finally:
            await outputs.aclose()

    setattr(obj, _FIRST, all_of_it())


def _raise_refusal(output: Any) -> None:
    """SGLang's scheduler refuses a streamed request by an output that says so."""
    meta = output.get("meta_info") if isinstance(output, dict) else None
    reason = (meta or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        raise HTTPException(int(reason["status_code"]), reason.get("message"))


async def native_response(original: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    """``/generate``: a stream's response once its first output is there."""
    from sglang.srt.entrypoints.request_headers import apply_header_overrides
    from sglang.srt.environ import envs

    if not obj.stream:
        return await original(obj, request)
    manager = tokenizer_manager()
    if envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get():
        apply_header_overrides(obj, request.headers)  # SGLang does so later, when the stream has begun
    repeats = _repeats.set(not manager.incremental_streaming_output)
    try:
        await start(manager, obj, request)
    except ValueError as error:
        return refusal(str(error))
    finally:
        _repeats.reset(repeats)  # the next request on this connection may inherit what this one has set
    return await original(obj, request)


async def _ollama(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any, *rest: Any
) -> Any:
    try:
        return await original(self, obj, request, *rest)
    except ValueError as error:
        return _ollama_refusal(obj, error)


def _ollama_refusal(obj: Any, error: ValueError) -> Any:
    prompt = "messages" if obj.text is None else "prompt"
    return refusal(as_sent(str(error), (), ("num_predict", "seed", prompt)))


async def _ollama_stream(
    original: Callable[..., Awaitable[Any]], self: Any, obj: Any, request: Any, *rest: Any
) -> Any:
    manager = self.tokenizer_manager
    try:
        await start(manager, obj, request)
    except ValueError as error:
        return _ollama_refusal(obj, error)
    outputs = _text_before_the_end(vars(obj)[_FIRST], not manager.incremental_streaming_output)
    setattr(obj, _FIRST, outputs)
    return await original(self, obj, request, *rest)


async def _text_before_the_end(outputs: AsyncIterator[Any], repeated: bool) -> AsyncIterator[Any]:
    """What SGLang's streams for Ollama are made of. They leave the text of the last output out, and take each
    output for all of the text so far. ``repeated``: whether it is, rather than what is new."""
    text = ""
    async with aclosing(outputs):  # type: ignore[type-var]
        async for out in outputs:
            text = out.get("text", "") if repeated else text + out.get("text", "")
            if out["meta_info"].get("finish_reason") is not None:
                yield {**out, "text": text, "meta_info": {**out["meta_info"], "finish_reason": None}}
            yield {**out, "text": text}


def _ollama_options(params: dict[str, Any], self: Any, options: Any = None) -> None:
    """SGLang passes on what its sampling parameters call otherwise: a ``seed``, and the
    ``num_predict`` of -1 or -2, which is as many tokens as fit."""
    if "seed" in params:
        params["sampling_seed"] = params.pop("seed")
    if params.get("max_new_tokens") in (-1, -2):
        params["max_new_tokens"] = None


async def _detokenize(
    original: Callable[..., Awaitable[Any]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    tokens = request.tokens
    try:
        lists = tokens if any(isinstance(t, list) for t in tokens) else [tokens]
        require_few("tokens", lists, self.tokenizer_manager.model_config.context_len)
        for ids in lists:
            token_ids("tokens", ids, _limits(self.tokenizer_manager))
    except RequestError as error:
        return self.create_error_response(str(error))
    return await original(self, adapted, request, raw_request)


def _keep_converted(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    if raw_request is not None:
        raw_request.state.adaserve_converted = result[0]
        of_client = getattr(request.response_format, "type", None) == "structural_tag"
        raw_request.state.adaserve_of_tools = bool(request.tools and not request.ebnf and not of_client)


def _keep_made(
    self: Any, request_id: str, prompt: Any, adapted: Any, *_: Any, raw_request: Any = None, **__: Any
) -> None:
    """Also raises RequestError for what runs in the background, while its status can still say so."""
    if raw_request is not None:
        raw_request.state.adaserve_converted = adapted
        raw_request.state.adaserve_of_tools = True  # nothing else on this route becomes such a grammar
        if adapted.background:
            check_fields(self.tokenizer_manager, adapted, raw_request)


def _grammar_of_tools(obj: Any, request: Any) -> bool:
    """Whether a structural tag or EBNF in ``obj`` is SGLang's own."""
    made = request is not None and getattr(request.state, "adaserve_converted", None) is obj
    return bool(made and request.state.adaserve_of_tools)


async def _openai_stream(
    original: Callable[..., Awaitable[Any]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    try:
        await start(self.tokenizer_manager, adapted, raw_request)
    except HTTPException as error:
        if error.status_code != HTTPStatus.BAD_REQUEST:
            raise
        return self.create_error_response(error.detail)
    except ValueError as error:
        return self.create_error_response(str(error))
    return await original(self, adapted, request, raw_request)


async def _messages_stream(
    original: Callable[..., Awaitable[Any]], self: Any, chat: Any, request: Any, raw_request: Any
) -> Any:
    response = await original(self, chat, request, raw_request)
    if hasattr(response, "body_iterator"):  # not run yet
        try:
            manager = self.openai_serving_chat.tokenizer_manager
            await start(manager, raw_request.state.adaserve_converted, raw_request)
        except ValueError as error:
            return self._error_response(
                status_code=400, error_type="invalid_request_error", message=str(error)
            )
    return response


async def _responses_stream(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any = None
) -> Any:
    if (most := request.max_output_tokens) is not None:
        try:
            integer(KEPT_OUTPUT_TOKENS)("max_output_tokens", most, _limits(self.tokenizer_manager))
        except RequestError as error:
            return self.create_error_response(str(error))
    response = await original(self, request, raw_request)
    if raw_request is not None and hasattr(response, "__anext__"):  # not run yet
        try:
            await start(self.tokenizer_manager, raw_request.state.adaserve_converted, raw_request)
        except ValueError as error:
            return self.create_error_response(str(error))
    return response


async def _responses_status(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """SGLang makes 400 of every error, also where a request was shed (429) or the server stops (503). As on
    OpenAI's other routes, the error's type is the status. A response that fails in the background says why,
    as OpenAI's do: SGLang keeps that it failed."""
    try:
        answer = await original(self, request, *args, **kwargs)
    except HTTPException as error:
        status = error.status_code
        answer = self.create_error_response(error.detail, err_type=str(status), status_code=status)
    kept = self.response_store.get(request.request_id) if request.background and not request.stream else None
    if kept is not None and kept.status != "cancelled" and isinstance(answer, JSONResponse):
        why = json.loads(bytes(answer.body))["error"]
        kept.error = {"code": str(why["code"]), "message": why["message"]}
    return answer


async def _without_a_traceback(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, before: Any, *rest: Any, **more: Any
) -> Any:
    """A response's prompt that cannot be made is the client's fault; SGLang logs all but one kind of these as
    faults of its own. What Pydantic finds wrong with the chat made of it is told as of other bodies."""
    from sglang.srt.entrypoints.openai.serving_responses import _MediaInputValidationError

    try:
        return await original(self, request, before, *rest, **more)
    except ValidationError as error:
        chat = {"messages": self._construct_input_messages(request, before, **more)}
        told = wrong_fields([{**one} for one in error.errors()], chat)
        raise _MediaInputValidationError(f"input makes no chat: {told}") from error
    except ValueError as error:
        raise _MediaInputValidationError(str(error)) from error


def _name_the_field(original: Callable[[Any], str | None], body: Any) -> str | None:
    """SGLang's own check of a body says which type it wanted, but not where."""
    wrong = original(body)
    if wrong is None:
        return None
    try:
        check_request(body, _limits(tokenizer_manager()))
    except RequestError as error:
        return str(error)
    return wrong


def refusal(
    message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The reason, as SGLang's own routes write it."""
    error = {"message": message, "type": "BadRequest", "code": int(status)}
    return JSONResponse({"error": error}, status, headers)

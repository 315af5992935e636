"""Every request is checked before it is queued, on every route, and a refusal is always HTTP 400.

Why: SGLang passes on what ends its scheduler, and with it the server for everybody: token ids outside the
vocabulary, counts beyond 32 bits, prompts without a token, and more (``adaserve.boundary``). All routes and
``sgl.Engine`` meet in ``TokenizerManager.generate_request``: there the fields are checked before SGLang
looks at them, and the prompt once it is tokenized.

A server that was told to stop waits until no request is left. SGLang takes new ones meanwhile, so it goes on
for as long as somebody sends any. Here they get 503.

Streams (``stream_starts.py``), Ollama's routes (``ollama.py``) and ``/v1/responses``
(``openai_responses.py``) need more, so that what is refused here is answered as such.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from sglang.srt.observability.req_time_stats import monotonic_time
from sglang.srt.plugins.hook_registry import HookType

from adaserve.asgi import route_path
from adaserve.boundary import (
    OF_MEDIA,
    Limits,
    RequestError,
    check_all_logprobs,
    check_all_prompts,
    check_logprobs,
    check_prompt,
    check_request,
)
from adaserve.boundary.prompts import require_few
from adaserve.boundary.sampling import without_empty_stops
from adaserve.boundary.values import identifier, token_ids
from adaserve.patches import hook, tokenizer_manager
from adaserve.slo.ledger import HEALTH_CHECK

STARTED = "_adaserve_started"
"""Where a request object keeps its outputs once they were started ahead of the response."""

BELIEVED_DELAY_S = 1.0
"""How long ago a request may say that it came."""

STOPPING = "this server is stopping: send the request to another one, or once more when it is back"

HEALTH_ROUTES = ("/health", "/health_generate")

REPEATS: ContextVar[bool] = ContextVar("adaserve_repeats", default=False)
"""Whether the request at hand is a stream whose outputs hold all that came before them, as on ``/generate``.
The other routes send what is new."""


@dataclass(slots=True)
class _Asked:
    """Of the prompts so far of the request at hand, for all their answers."""

    prompt_tokens: int = 0
    logprobs: int = 0


_asked: ContextVar[_Asked] = ContextVar("adaserve_asked")
"""All tasks that serve the request count in it."""


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.generate_request", _every_request, HookType.AROUND)
    hook(f"{manager}._validate_one_request", _check_tokens, HookType.BEFORE)
    for call in ("open_session", "close_session"):
        hook(f"{manager}.{call}", _check_session_id, HookType.BEFORE)
    openai = "sglang.srt.entrypoints.openai"
    chat = f"{openai}.serving_chat.OpenAIServingChat._convert_to_internal_request"
    hook(chat, _keep_converted, HookType.AFTER)
    detokenize = f"{openai}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request"
    hook(detokenize, _detokenize, HookType.AROUND)
    hook("sglang.srt.entrypoints.api_contract.generate_contract_error", _name_the_field, HookType.AROUND)


def _every_request(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Also for ``sgl.Engine``: raises RequestError, a ValueError, before anything is queued."""
    outputs: AsyncIterator[Any] | None = vars(obj).pop(STARTED, None)
    if outputs is not None:
        return outputs
    if self.gracefully_exit:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, STOPPING)
    check_fields(self, obj, request)
    return original(self, obj, request)


def limits_of(manager: Any, of_tools: bool = False) -> Limits:
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
    _asked.set(_Asked())
    limits = limits_of(manager, _grammar_of_tools(obj, request))
    check_request(vars(obj), limits)
    obj.sampling_params = without_empty_stops(obj.sampling_params)
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
        identifier("session_id", obj.session_id, limits_of(self))


def _check_tokens(self: Any, obj: Any, input_ids: Any) -> None:
    """Each prompt of a request, tokenized; runs before anything of it was sent."""
    if input_ids is not None:
        continues = bool(getattr(obj, "session_params", None))
        check_prompt(len(input_ids), getattr(obj, "logprob_start_len", None), continues)
        so_far = _asked.get(_Asked())
        so_far.prompt_tokens += len(input_ids) * _samples(obj)
        check_all_prompts(so_far.prompt_tokens)
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
    held = check_logprobs(told, new, each, repeated=REPEATS.get(), after_others=after_others)
    so_far = _asked.get(_Asked())
    so_far.logprobs += held * _samples(obj)
    check_all_logprobs(so_far.logprobs)


def _samples(obj: Any) -> int:
    return (getattr(obj, "sampling_params", None) or {}).get("n") or 1


async def _detokenize(
    original: Callable[..., Awaitable[Any]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    tokens = request.tokens
    try:
        lists = tokens if any(isinstance(t, list) for t in tokens) else [tokens]
        require_few("tokens", lists, self.tokenizer_manager.model_config.context_len)
        for ids in lists:
            token_ids("tokens", ids, limits_of(self.tokenizer_manager))
    except RequestError as error:
        return self.create_error_response(str(error))
    return await original(self, adapted, request, raw_request)


def _keep_converted(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    if raw_request is not None:
        raw_request.state.adaserve_converted = result[0]
        of_client = getattr(request.response_format, "type", None) == "structural_tag"
        raw_request.state.adaserve_of_tools = bool(request.tools and not request.ebnf and not of_client)


def _grammar_of_tools(obj: Any, request: Any) -> bool:
    """Whether a structural tag or EBNF in ``obj`` is SGLang's own."""
    made = request is not None and getattr(request.state, "adaserve_converted", None) is obj
    return bool(made and request.state.adaserve_of_tools)


def _name_the_field(original: Callable[[Any], str | None], body: Any) -> dict[str, Any] | None:
    """SGLang's own check of a body says which type it wanted, but not where. And it says so by a text, which
    becomes the answer's ``error``, where all others on ``/generate`` have a message in it."""
    wrong = original(body)
    if wrong is None:
        return None
    try:
        check_request(body, limits_of(tokenizer_manager()))
    except RequestError as error:
        wrong = str(error)
    return _error(wrong)


def refusal(
    message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The reason, as SGLang's own routes write it."""
    return JSONResponse({"error": _error(message, status)}, status, headers)


def _error(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> dict[str, Any]:
    return {"message": message, "type": status.phrase.replace(" ", ""), "code": int(status)}

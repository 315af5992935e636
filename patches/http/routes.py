"""Routes of SGLang's HTTP server that ADASERVE does not offer are refused.

What SGLang cannot make a request of gets 400 in place of 500. ``sgl.Engine`` calls the methods of the
tokenizer manager that most routes are named after: they raise the same sentence as a RequestError. So does
``sgl.Engine.collective_rpc`` for methods of the scheduler that do the same, or save weights.

Why: many control routes hand what a client sends to the scheduler, where a wrong value ends it, and most are
open to everybody when the server has no key. Those for features that ADASERVE refuses at the start (LoRA,
disaggregation, ...) or cannot follow (weights that it has packed) can only do harm.

WebSockets are refused: SGLang asks for no key there (its only one, /v1/realtime, transcribes speech).

Methods that nobody serves get 405: SGLang would keep each as a label of its metrics (``metric_labels.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from traceback import walk_tb
from typing import Any

from jinja2 import TemplateError
from sglang.srt.plugins.hook_registry import HookType
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from adaserve.asgi import put_around, route_path
from adaserve.boundary import RequestError
from adaserve.host.device import PROFILE_ROUTES_ENV, is_measured
from adaserve.patches import hook, tokenizer_manager
from adaserve.patches.http.openai_errors import in_shape
from adaserve.patches.http.validation import refusal

_READER = "request_body_to_args"  # FastAPI's step from a parsed body to a route's arguments
_OF_CLIENTS = (ValueError, TemplateError)  # SGLang's own custom; on Ollama's route, what a template refuses
_BUILDER = "vertex_generate"  # hands a client's fields to the constructor of a request as they are

_WEIGHTS = "weights are packed when the server starts: restart it to serve others"
_LORA = "LoRA adapters are not served"
_CACHE = "the hierarchical cache is not used"
_PAUSE = "it is for replacing weights, which are packed when the server starts"
_EXPERTS = "the distribution over experts is not recorded"
_GROW = "the server cannot grow or change its role while it runs"
_CORPUS = "drafts come from the draft model, not from a corpus"

_PROFILE = f"profile it from outside, with py-spy or nsys, or start it with {PROFILE_ROUTES_ENV}=1"

PROFILING = ("/start_profile", "/stop_profile")
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
            "/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update",
            "/update_weight_version", "/init_weights_update_group", "/destroy_weights_update_group",
            "/weights_checker",
            "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
            "/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info",
            "/get_weights_by_name", "/release_memory_occupation", "/resume_memory_occupation",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("/pause_generation", "/continue_generation"), _PAUSE),
    **dict.fromkeys(("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"), _LORA),
    **dict.fromkeys(
        ("/hicache/storage-backend", "/hicache/storage-backend/clear", "/get_hicache_l3_cache_layout"), _CACHE
    ),
    **dict.fromkeys(
        (
            "/start_expert_distribution_record", "/stop_expert_distribution_record",
            "/dump_expert_distribution_record",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(("/pd_role_switch", "/scale_elastic_ep", "/is_scaling_elastic_ep"), _GROW),
    **dict.fromkeys(("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"), _CORPUS),
    **dict.fromkeys(PROFILING, _PROFILE),
    "/configure_logging": "set --log-requests and --log-level when the server starts",
    "/slow_down": "it is for tests of SGLang",
}  # fmt: skip

ROUTES_ONLY = frozenset(
    (
        "/weights_checker", "/get_remote_instance_transfer_engine_info",
        "/remote_instance_transfer_engine_info", "/hicache/storage-backend", "/hicache/storage-backend/clear",
        "/is_scaling_elastic_ep",
    )
)  # fmt: skip
"""Those after which no method of the tokenizer manager is named."""

SAVING = dict.fromkeys(
    ("save_remote_model", "save_sharded_model"),
    "weights are packed when the server starts: copy its checkpoint",
)
"""Methods of the scheduler that ``sgl.Engine`` calls by name, and no route."""

TRANSCRIPTIONS = "/v1/audio/transcriptions"
"""SGLang decodes audio first, whatever the model takes, and logs a traceback of each library that fails."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

TWO_LENGTHS = "a request has either Transfer-Encoding or Content-Length: with both it ends in two places"
"""A proxy may have read it to the other end, and take the rest for another client's request (RFC 9112)."""


def register() -> None:
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
    hook(f"{chat}._apply_jinja_template", _render, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook("sglang.srt.entrypoints.engine.Engine.collective_rpc", refuse_rpc, HookType.BEFORE)
    for path in refused_routes().keys() - ROUTES_ONLY:
        hook(f"{manager}.{path.removeprefix('/')}", refuse_call(path), HookType.BEFORE)


def refused_routes() -> dict[str, str]:
    """Why each of the routes is refused by this server."""
    allowed = PROFILING if is_measured() else ()
    return {path: why for path, why in REFUSED.items() if path not in allowed}


def _sentence(path: str, why: str) -> str:
    return f"{path} is refused by a server that runs ADASERVE: {why}"


def refuse_call(path: str) -> Callable[..., None]:
    """What runs before the tokenizer manager's method that ``path`` is named after."""

    def check(*_: Any, **__: Any) -> None:
        raise RequestError(_sentence(path, REFUSED[path]))

    return check


def refuse_rpc(_: Any, method: str, **__: Any) -> None:
    """Runs before a method of all schedulers is called by its name. Raises RequestError."""
    why = refused_routes().get(f"/{method}") or SAVING.get(method)
    if why is not None:
        raise RequestError(_sentence(method, why))


def mount(app: Any) -> None:
    """Puts the refusals around SGLang's app."""
    for kind in (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, *_OF_CLIENTS):
        app.add_exception_handler(kind, _unreadable)
    put_around(app, Routes)


def _takes_media() -> bool:
    manager = tokenizer_manager()
    return manager is not None and manager.mm_processor is not None


class Routes:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._refused = app, refused_routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        if scope["type"] != "http":
            return WebSocketClose() if scope["type"] == "websocket" else None
        if {b"transfer-encoding", b"content-length"} <= {name for name, _ in scope["headers"]}:
            return refusal(TWO_LENGTHS, headers={"connection": "close"})
        if scope["method"] not in METHODS:
            return refusal(f"methods are {', '.join(sorted(METHODS))}", HTTPStatus.METHOD_NOT_ALLOWED)
        path = route_path(scope).rstrip("/")
        if path == TRANSCRIPTIONS and not _takes_media():
            return refusal(f"{path} is refused: this model takes text only")
        why = self._refused.get(path)
        return None if why is None else refusal(_sentence(path, why))


def _render(original: Callable[..., Any], self: Any, request: Any, *rest: Any) -> Any:
    """Refuses chat_template_kwargs and messages of which the chat template can make nothing."""
    try:
        return original(self, request, *rest)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"the chat template cannot render this request: {error!r}") from error


async def _unreadable(request: Any, error: Exception) -> Any:
    """A request on which SGLang falls over before it is one: 400 where the fault is the client's."""
    if not _is_the_clients(error):
        raise error
    path = route_path(request.scope)
    return in_shape(refusal(f"the body is not a valid request for {path}: {error}"), path=path)


def _is_the_clients(error: Exception) -> bool:
    """One of a kind that always is; a body SGLang's validators choke on; a field no request has."""
    names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, _OF_CLIENTS) or _READER in names or names[-1] == _BUILDER

"""Every hook into SGLang 0.5.23, one module per concern, each with the reason why it is needed.

SGLang's hook registry only logs a target that it cannot patch and serves on without it. Here the start fails:
with another SGLang (``apply_all``), where a target is missing (``hook``) or a route (``wrap_routes``), and
where the registry gave up (``require_applied``).
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Collection
from functools import wraps
from importlib import import_module
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from adaserve.sglang_compat import NAME, PatchError, require_sglang

targets: list[str] = []
"""Dotted paths that we hook; the contract tests check their signatures."""


def hook(target: str, function: Callable[..., Any], kind: HookType, *, always: bool = False) -> None:
    """Registers one hook. Raises PatchError when ``target`` does not exist.

    On a server that does not run ADASERVE it does nothing, unless it replaces a function, or acts ``always``:
    because the settings are not known yet, because any server needs it, or because it runs so often that it
    asks ``is_active`` itself, after cheaper questions.
    """
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"SGLang has no {target}, which AdaServe hooks") from error
    everywhere = always or kind is HookType.REPLACE
    HookRegistry.register(target, function if everywhere else _where_ours(function, kind), kind)
    targets.append(target)


def _where_ours(function: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    if kind is HookType.AROUND:

        @wraps(function)
        def around(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs) if is_active() else original(*args, **kwargs)

        return around

    @wraps(function)
    def beside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_active() else None

    return beside


def wrap_routes(app: Any, paths: Collection[str], wrap: Callable[[Any], Any]) -> None:
    """Puts an ASGI app around that of each of these routes. Raises PatchError when one does not exist."""
    found = [route for route in app.router.routes if getattr(route, "path", None) in paths]
    if missing := set(paths) - {route.path for route in found}:
        raise PatchError(f"SGLang has no route {', '.join(sorted(missing))}, which AdaServe guards")
    for route in found:
        route.app = wrap(route.app)


def is_active() -> bool:
    """Whether the server of this process runs ADASERVE.

    Any other is as SGLang made it. But it starts on hosts where SGLang alone would not (``start``), tells
    nobody its keys (``keys``), and keeps few of the processors that it has read (``logit_processors``).
    """
    return runtime_context.get_spec().speculative_algorithm == NAME


def tokenizer_manager() -> Any:
    """SGLang's, of an HTTP process; None before it is made, and in other processes."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    return None if state is None else state.tokenizer_manager


MODULES = {
    "start": (
        "rebind_imports",  # of all of them
        "flags",
        "kv_reserve",
        "kv_sizing",
        "cpu_kernels",
        "dual_gemm",
        "flash_mla",
        "fork_children",
        "gloo_threads",
        "worker_supervisor",
        "stop_signals",
        "http_app_setup",
    ),
    "http": (
        "slo_requests",
        "slo_responses",
        "arrival_times",
        "validation",  # after the SLO hooks: what wraps last is asked first
        "stream_starts",
        "ollama",
        "openai_responses",
        "openai_errors",  # around all of these
        "bodies",
        "tokenizing",
        "media",
        "keys",
        "routes",
        "load_headers",
        "cached_status",
        "metric_labels",
        "streamed_parsers",
        "parsers",  # around it: a chunk has its time, not each of its tokens
        "response_store",
        "small_chunks",
        "slow_readers",
        "gone_clients",
    ),
    "scheduler": (
        "refused_starts",
        "prefill_slack",
        "mixed_forwards",
        "sessions",
        "scheduler_guard",  # around it: an id that is live is refused first
        "stop_strings",
        "grammar_memory",
        "grammar_polls",
        "grammar_errors",
        "grammar_time",
        "no_allowed_token",
        "logit_processors",
        "repetition_penalties",
        "prefill_logprobs",
        "result_copies",
        "accept_rates",
        "request_ends",
        "retracted_requests",
        "replayed_answers",
        "internal_state",
        "load_reports",
        "idle_learning",
        "shedding",
    ),
}
"""Those that hook something, by where most of it acts (their folder), in the order in which they do."""


def apply_all() -> None:
    """Registers all hooks; SGLang applies them right after its plugins were loaded. Raises PatchError."""
    require_sglang()
    logging.getLogger(HookRegistry.__module__).addFilter(not_ours_alone)
    for folder, names in MODULES.items():
        for name in names:
            import_module(f"adaserve.patches.{folder}.{name}").register()


def not_ours_alone(record: logging.LogRecord) -> bool:
    """False for SGLang's warning of two hooks around one function, where both are ours and made for that."""
    values: Any = record.args
    return (
        not record.msg.startswith("Multiple AROUND hooks") or values[2].count("plugin=adaserve,") < values[1]
    )


def require_applied() -> None:
    """Raises PatchError where SGLang's registry could not apply a hook: it only logs that."""
    if lost := set(targets) - HookRegistry._patched:
        raise PatchError(f"SGLang did not apply the hooks of {', '.join(sorted(lost))}")

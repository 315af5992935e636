"""Every hook into SGLang 0.5.23, one module per concern, each with the reason why it is needed.

SGLang's hook registry only logs a target that it cannot patch and serves on without it. So every target is
checked here first (``hook``): where SGLang has moved one, the start fails and names it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from adaserve.identity import SGLANG_VERSION, is_ours

targets: list[str] = []
"""Dotted paths that we hook; the contract tests check their signatures."""


class PatchError(RuntimeError):
    """A place in SGLang that AdaServe hooks is not there: wrong SGLang version."""


def hook(target: str, function: Callable[..., Any], kind: HookType) -> None:
    """Registers one hook. Raises PatchError when ``target`` does not exist."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"SGLang has no {target}, which AdaServe hooks. It was made for sglang {SGLANG_VERSION}: "
            f"pip install sglang=={SGLANG_VERSION}"
        ) from error
    HookRegistry.register(target, function, kind)
    targets.append(target)


def is_active() -> bool:
    """Whether the server of this process runs ADASERVE; hooks leave any other as SGLang made it."""
    from sglang.srt.runtime_context import get_spec

    return is_ours(get_spec().speculative_algorithm)


MODULES = (
    "flags",
    "kv_reserve",
    "kv_sizing",
    "cpu_kernels",
    "dual_gemm",
    "flash_mla",
    "fork_children",
    "gloo_threads",
    "prefill_slack",
    "slo_requests",
    "slo_responses",
    "boundary",  # after the SLO hooks: what wraps last is asked first
    "openai_errors",  # around both
    "bodies",
    "metric_labels",
    "metrics_cost",
    "tokenizing",
    "unread_streams",
    "gone_clients",
    "parsers",
    "scheduler_guard",
    "stop_strings",
    "grammar_memory",
    "grammar_time",
    "dead_ends",
    "logit_processors",
    "prefill_logprobs",
    "request_ends",
    "replayed_answers",
    "response_store",
    "internal_state",
    "server_info",
    "keys",
    "load_reports",
    "shedding",
    "routes",
    "worker_supervisor",
    "load_headers",
    "http_parts",
)
"""Those that hook something, in the order in which they do."""


def apply_all() -> None:
    """Registers all hooks; SGLang applies them right after its plugins were loaded."""
    for name in MODULES:
        import_module(f"adaserve.patches.{name}").register()

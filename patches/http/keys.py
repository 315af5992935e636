"""A server's keys are shown to nobody, and a malformed key is answered with 401, like any wrong one.

Why: ``/server_info`` shows how the server was started, and with it the keys: every user read the admin's
there, and on a server with an admin key alone everybody did. What SGLang already hides there (the keys of
watermarks) shows where the others belong. Files of --crash-dump-folder hold the same settings, and there it
hides nothing as long as there are no watermarks.

SGLang compares keys as text, which Python does only for ASCII. So a client that sent ``Bearer é`` to a server
with a key got 500, and the log a traceback.

``/health``, ``/ready`` and ``/metrics`` need no key, with all that begins like them. With --fastapi-root-path
SGLang looks for them at the beginning of the prefix: below ``/llm`` they asked for a key, and below
``/health-ai`` no route did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.redaction import HIDDEN, SECRETS, without_secrets


def register() -> None:
    core = "sglang.srt.sampling.watermarking.core"
    hook(f"{core}.redact_watermark_secrets", _hide, HookType.AROUND, always=True)
    hook(f"{core}.redact_watermark_command_line", _hide_in_command, HookType.AROUND, always=True)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._server_args_for_dump", _dumped, HookType.AROUND, always=True)
    hook("sglang.srt.utils.auth.decide_request_auth", _decide, HookType.AROUND, always=True)


def _hide(original: Callable[..., Any], value: Any, **more: Any) -> Any:
    """SGLang's function copies dictionaries, and calls itself for what is in them."""
    result = original(value, **more)
    if isinstance(result, dict):
        for name in SECRETS:
            if result.get(name):
                result[name] = HIDDEN
    return result


def _hide_in_command(original: Callable[..., str], argv: Sequence[str], *rest: Any, **more: Any) -> str:
    return original(list(without_secrets(argv)), *rest, **more)


def _dumped(_: Callable[..., Any], self: Any) -> dict[str, Any]:
    from sglang.srt.sampling.watermarking import core

    return dict(core.redact_watermark_secrets(self.server_args.resolved_dict()))


def _decide(original: Callable[..., Any], *, path: str, authorization_header: str | None, **more: Any) -> Any:
    from sglang.srt.runtime_context import get_serving

    path = path.removeprefix(get_serving().fastapi_root_path)
    if authorization_header is not None and not authorization_header.isascii():
        authorization_header = None
    return original(path=path, authorization_header=authorization_header, **more)

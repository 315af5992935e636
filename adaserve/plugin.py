"""Entry point ``sglang.srt.plugins``: makes the speculative algorithm ADASERVE known to SGLang."""

from __future__ import annotations

import os

_failure: BaseException | None = None
_registered = False


def register() -> None:
    """Registers algorithm, attention backend and hooks; called once in every SGLang process.

    SGLang only logs a plugin's failure and would serve without it, so the failure is kept and
    raised when a server that asked for ADASERVE starts (``ensure_registered``).
    """
    global _failure, _registered
    if _registered:
        return
    try:
        # Used by SGLang only when it starts several HTTP workers, which load no plugins themselves.
        os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", "adaserve.http_app:app")
        from adaserve import algorithm
        from adaserve.patches import apply_all

        algorithm.register()
        apply_all()
        _registered = True
    except BaseException as error:
        _failure = error
        raise


def ensure_registered() -> None:
    """Raises what went wrong in ``register``."""
    if _failure is not None:
        raise RuntimeError("AdaServe could not be registered with SGLang; see the cause above") from _failure
    if not _registered:
        raise RuntimeError(
            "AdaServe's SGLang plugin was not loaded. If SGLANG_PLUGINS or SGLANG_PLATFORM is set, add 'adaserve'."
        )

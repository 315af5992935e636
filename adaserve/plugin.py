"""Entry point ``sglang.srt.plugins``: makes the speculative algorithm ADASERVE known to SGLang."""

from __future__ import annotations

import os
from dataclasses import dataclass

from adaserve.lifetime import die_with_parent


@dataclass
class _Registration:
    """Whether this process has registered, and what went wrong."""

    done: bool = False
    failure: BaseException | None = None


_registration = _Registration()


def register() -> None:
    """Registers algorithm, attention backend and hooks; called once in every SGLang process.

    SGLang only logs a plugin's failure and would serve without it, so the failure is kept and
    raised when a server that asked for ADASERVE starts (``ensure_registered``).
    """
    if _registration.done:
        return
    die_with_parent()
    try:
        # Used by SGLang only when it starts several HTTP workers, which load no plugins themselves.
        os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", "adaserve.http_app:app")
        from adaserve import algorithm
        from adaserve.patches import apply_all

        algorithm.register()
        apply_all()
        _registration.done = True
    except BaseException as error:
        _registration.failure = error
        raise


def ensure_registered() -> None:
    """Raises RuntimeError with what went wrong in ``register``."""
    if _registration.failure is not None:
        raise RuntimeError(
            "AdaServe could not be registered with SGLang; see the cause above"
        ) from _registration.failure
    if not _registration.done:
        raise RuntimeError(
            "AdaServe's SGLang plugin was not loaded: "
            "if SGLANG_PLUGINS or SGLANG_PLATFORM is set, add adaserve to it"
        )

"""Entry point ``sglang.srt.plugins``: makes the speculative algorithm ADASERVE known to SGLang."""

from __future__ import annotations

from adaserve.host.lifetime import die_with_parent
from adaserve.host.signals import dump_stacks_on_signal
from adaserve.sglang_compat import registration, require_sglang


def register() -> None:
    """Registers algorithm, attention backend and hooks; called once in every SGLang process.

    A failure is kept, and raised when a server that asked for ADASERVE starts (``ensure_registered``).
    """
    die_with_parent()
    dump_stacks_on_signal()
    try:
        require_sglang()
        from adaserve import algorithm
        from adaserve.patches import apply_all

        algorithm.register()
        apply_all()
    except BaseException as error:
        registration.failure = error
        raise

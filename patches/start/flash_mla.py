"""SGLang's own speculation without the package ``flash_mla`` (sgl-flash-mla).

Why: on a CUDA host ``EagleDraftWorker``, from which STANDALONE and EAGLE3 derive, imports every attention
backend that can draft from a graph, only to ask whether the one that serves is among them. The backend of
FlashMLA imports ``flash_mla`` at its top, so that a host without that package cannot start the servers that
AdaServe is compared with, although none of their models uses multi-head latent attention.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from adaserve.patches import PatchError

BACKEND = "sglang.srt.layers.attention.flashmla_backend"


class FlashMLABackend:
    """No server's backend, so that ``isinstance`` says no. Raises ModuleNotFoundError where one is asked for,
    as ``--attention-backend flashmla`` does."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModuleNotFoundError(
            "FlashMLA's attention backend needs the package flash_mla: pip install sgl-flash-mla",
            name="flash_mla",
        )


def register() -> None:
    """Puts a module with that class in the backend's place. Raises PatchError where SGLang has no such
    module."""
    if find_spec("flash_mla") is not None or BACKEND in sys.modules:
        return
    if find_spec(BACKEND) is None:
        raise PatchError(f"SGLang has no {BACKEND}")
    stub: Any = ModuleType(BACKEND, __doc__)
    stub.FlashMLABackend = FlashMLABackend
    sys.modules[BACKEND] = stub

"""What serves on this host: its accelerator, or AdaServe's CPU platform. And what tools ask of such a server.

PyTorch is imported where it is asked for: commands must start at once.
"""

from __future__ import annotations

import os

ATTENTION_BACKEND = "adaserve_cpu"


def select() -> str | None:
    """Entry point ``sglang.srt.platforms``: our class where the host has nothing but a CPU.

    None where an accelerator is there or another CPU platform was asked for, so that a GPU host is
    never touched.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # SGLang's own CPU build was asked for
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if torch.backends.mps.is_available() or hasattr(torch, "npu"):
        return None
    return "adaserve.platform.AdaServeCpuPlatform"


def on_cpu() -> bool:
    """Whether our CPU platform serves on this host."""
    return select() is not None


PROFILE_ROUTES_ENV = "ADASERVE_PROFILE_ROUTES"
"""1: the server is started to be measured, as by `adaserve gpu-check`: see ``is_measured``."""

FORK_ENV = "ADASERVE_FORK"
"""1: a server on a CPU host may fork its scheduler and its detokenizer from its first process."""

DEVICE_PATH_ENV = "ADASERVE_DEVICE_PATH"
"""Set to 1 to run a GPU's parts on a CPU host: slower, but it exercises the GPU's code path."""


def on_device(device: object) -> bool:
    """Whether iterations run on a GPU's parts: the one place where that is decided."""
    return str(device).startswith("cuda") or os.environ.get(DEVICE_PATH_ENV) == "1"


NO_E4M3 = (
    "a KV cache of fp8_e4m3 needs a GPU of the Ada generation or later (compute capability 8.9): use "
    "--kv-cache-dtype fp8_e5m2 or bf16"
)


def reads_e4m3() -> bool:
    """Whether our attention over such keys can be compiled for this host's GPU, if it has one."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def is_measured() -> bool:
    """Whether clients may record torch profiles, and ask for the server's state as often as they like."""
    return os.environ.get(PROFILE_ROUTES_ENV) == "1"

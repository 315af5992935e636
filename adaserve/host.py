"""Which hosts AdaServe's CPU platform serves on. Imports nothing of SGLang."""

from __future__ import annotations

import os

import torch

ATTENTION_BACKEND = "adaserve_cpu"


def select() -> str | None:
    """Entry point ``sglang.srt.platforms``: our class where the host has nothing but a CPU.

    None where an accelerator is there or another CPU platform was asked for, so that a GPU host is
    never touched.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # SGLang's own CPU build was asked for
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if torch.backends.mps.is_available() or hasattr(torch, "npu"):
        return None
    return "adaserve.platform.AdaServeCpuPlatform"


DEVICE_PATH_ENV = "ADASERVE_DEVICE_PATH"
"""Set to 1 to run a GPU's parts on a CPU host: slower, but it exercises the GPU's code path."""


def on_device(device: object) -> bool:
    """Whether iterations run on a GPU's parts: the one place where that is decided."""
    return str(device).startswith("cuda") or os.environ.get(DEVICE_PATH_ENV) == "1"

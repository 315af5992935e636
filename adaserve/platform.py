"""SGLang platform for hosts without an accelerator.

``adaserve.host.device.select`` decides where it applies; it stands apart because SGLang asks it while it
imports what this module needs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, SRTPlatform

from adaserve.host.cores import short_spins
from adaserve.host.device import ATTENTION_BACKEND

OVERLAP_ENV = "ADASERVE_CPU_OVERLAP"
"""Set to 1 to run SGLang's overlap schedule on a CPU host: slower, but it exercises the GPU's code path."""


class AdaServeCpuPlatform(SRTPlatform, CpuDeviceMixin):
    """Stock SGLang on plain PyTorch CPU operators and AdaServe's own CPU kernels."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        """A name, which is what SGLang takes apart where no --device is given, and no torch.device."""
        return self.device_name

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Settings without which SGLang 0.5.23 reaches for CUDA-only code on a CPU."""
        if os.environ.get(OVERLAP_ENV, "0") != "1":
            server_args.disable_overlap_schedule = True  # nothing runs beside a CPU
        server_args.disable_cuda_graph = True
        server_args.disable_hybrid_swa_memory = True  # CpuAttentionBackend knows one pool
        short_spins(os.environ)  # of the scheduler, which is not started yet
        # Compiled operators would start a compiler in the middle of a request (repetition penalties do).
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # SGLang would wait a minute for a GPU's core dump before a broken server ends.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
        # SGLang has filled in its own CPU defaults by now; torch_native ignores tree masks.
        if server_args.attention_backend in ("intel_amx", "torch_native"):
            server_args.attention_backend = ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from adaserve.engine.cpu.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Puts our forward under the model, speculative or not, so that all policies gain alike."""
        from adaserve.checkpoints.draft_kind import HEADS
        from adaserve.config import AdaServeConfig
        from adaserve.engine.cpu.install import install, limit_threads

        limit_threads()
        weights = AdaServeConfig.load().cpu_weights
        # Heads are packed once they know the target.
        if weights != "off" and type(model).__name__ not in HEADS:
            install(model, weights)

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

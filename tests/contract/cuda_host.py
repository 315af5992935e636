"""A process that looks like the GPU host of the bundle: one H100, and no packages besides the bundle's and
what such a host has. It computes nothing.

Run as a program it imports the serving path, registers AdaServe with SGLang and asks what a model's MLP asks,
and prints what went well.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SERVING_PATH = (
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.flashinfer_backend",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.kernels.ops.attention.extend_attention",
    "adaserve.engine.worker",
    "adaserve.engine.device.parts",
    "adaserve.bench.gpu_check.check",
)


def _named(name: str) -> set[str]:
    """The packages that a list of scripts/ names, without versions and remarks."""
    lines = (Path(__file__).resolve().parents[2] / "scripts" / name).read_text().splitlines()
    return {re.split("==|#", line)[0].strip() for line in lines}


class HostFinder:
    """Finds no package that is neither carried over nor there."""

    there = _named("gpu_bundle.txt") | _named("gpu_host.txt") | {"adaserve"}
    known = metadata.packages_distributions()
    find_distributions = PathFinder.find_distributions

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        packages = {re.sub("[-_.]+", "-", p).lower() for p in cls.known.get(name, ())}
        if path is None and packages and not packages & cls.there:
            return None
        return PathFinder.find_spec(name, path, target)


def pretend() -> None:
    """Must come before SGLang is imported, which looks at the host once."""
    sys.path[:] = [p for p in sys.path if "cutlass" not in p]
    sys.meta_path[:] = [HostFinder if f is PathFinder else f for f in sys.meta_path]
    import torch

    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        major=9, minor=0, name="H100", total_memory=80 << 30, multi_processor_count=132
    )
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "H100"
    cuda.get_device_properties = lambda *_: properties
    # The compiled operators of sglang-kernel need a driver; its Python is the real one.
    loader: Any = ModuleType("sgl_kernel.load_utils")
    loader._load_architecture_specific_ops = lambda: None
    loader._preload_cuda_library = lambda: None
    sys.modules["sgl_kernel.load_utils"] = loader


def ask_dual_gemm() -> Any:
    """What every MLP of a Llama or Qwen 2 does when it is built; None = no fused kernel."""
    import torch
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layer: Any = SimpleNamespace(
        quant_method=UnquantizedLinearMethod(), params_dtype=torch.float16, output_partition_sizes=[128]
    )
    return DualGemm.__new__(DualGemm)._select_mode(layer, 64)


def main() -> None:
    pretend()
    for name in SERVING_PATH:
        importlib.import_module(name)
        print("imported", name)
    try:
        ask_dual_gemm()
    except ModuleNotFoundError as error:
        print("as it comes: missing", error.name)
    from sglang.srt.plugins.hook_registry import HookRegistry

    from adaserve.plugin import register

    register()
    HookRegistry.apply_hooks()
    print("registered:", ask_dual_gemm())


if __name__ == "__main__":
    main()

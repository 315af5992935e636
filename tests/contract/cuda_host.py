"""A process that looks like the GPU host of the bundle: one H100, and no packages besides the bundle's and
what such a host has. It computes nothing.

Run as a program it imports the serving path, registers AdaServe with SGLang, asks what a model's MLP and the
draft worker of SGLang's own speculation ask, and prints what went well.
"""

from __future__ import annotations

import importlib
import os
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
    # What EagleDraftWorker imports on a CUDA host when it is about to capture its graphs, and FLASH_MLA.
    "sglang.srt.layers.attention.dsa_backend",
    "sglang.srt.layers.attention.deepseek_v4_backend",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
    "sglang.srt.speculative.standalone_worker_v2",
    "adaserve.engine.worker",
    "adaserve.engine.gpu.device",
    "adaserve.bench.gpu_check.check",
)

FLASH_MLA = "sglang.srt.layers.attention.flashmla_backend"
"""On the serving path too, but it imports only once AdaServe is registered: ``flash_mla`` is not there."""


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


def ask_graphs() -> bool:
    """What a draft worker of SGLang's own speculation does before it captures its graphs: it asks whether
    the attention backend that serves is one of those that it imports for the question."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

    return isinstance(FlashInferAttnBackend.__new__(FlashInferAttnBackend), FlashMLABackend)


def main() -> None:
    pretend()
    for name in SERVING_PATH:
        importlib.import_module(name)
        print("imported", name)
    for ask in (ask_dual_gemm, ask_graphs):
        try:
            ask()
        except ModuleNotFoundError as error:
            print("as it comes: missing", error.name)
    from sglang.srt.plugins.hook_registry import HookRegistry

    from adaserve.plugin import register

    register()
    HookRegistry.apply_hooks()
    print("registered:", ask_dual_gemm(), ask_graphs())
    try:
        importlib.import_module(FLASH_MLA).FlashMLABackend(None)
    except ModuleNotFoundError as error:
        print("asked for:", error)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # to end in order takes SGLang's modules seconds

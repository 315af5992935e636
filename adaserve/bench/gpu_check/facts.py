"""What a GPU host has of what its first run needs; JSON. ``python -m adaserve.bench.gpu_check.facts``"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adaserve.host import describe_host

TOOLS = ("nvcc", "ninja", "c++", "nvidia-smi")
PACKAGES = ("torch", "triton", "transformers", "sglang", "sglang-kernel", "flashinfer-python")
DISK_BYTES = 256 << 20


def facts(folder: Path) -> dict[str, Any]:
    """JSON values; ``folder``: where the disk is tried."""
    found = {
        "host": describe_host(),
        "glibc": " ".join(platform.libc_ver()),
        "tools": {name: shutil.which(name) for name in TOOLS},
        "packages": {name: _version(name) for name in PACKAGES},
        "cutlass": importlib.util.find_spec("cutlass") is not None,
        "libcuda_stub": str(stub) if (stub := _stub()) else None,
        "disk_write_mb_per_s": round(_disk(folder), 1),
        "disk_free_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
    }
    return {**found, "cuda": _cuda()}


def remedies(found: dict[str, Any]) -> list[str]:
    """What to do about what is missing."""
    said = []
    missing = [name for name in TOOLS[:3] if found["tools"][name] is None]
    if missing or found["libcuda_stub"] is None:
        what = ", ".join(
            [*missing, *(["libcuda.so of CUDA's stubs"] if found["libcuda_stub"] is None else [])]
        )
        said.append(
            f"{what} missing: FlashInfer may not compile (see kernels); ATTENTION=triton does without"
        )
    if found["cuda"] is None:
        said.append("PyTorch sees no GPU: only --device cpu will run")
    if found["disk_free_gb"] < 40:
        said.append("less than 40 GB free: use the small pair (PAIR=small)")
    elif found["disk_write_mb_per_s"] < 150:
        said.append("the disk writes 18 GB in more than two minutes: start with PAIR=small meanwhile")
    return said


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _stub() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = Path(home) / "lib64" / "stubs" / "libcuda.so"
    return found if found.exists() else None


def _disk(folder: Path) -> float:
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start_s = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / 1e6 / (time.perf_counter() - start_s)


def _cuda() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(0)
    return {
        "name": p.name, "capability": [p.major, p.minor], "memory_gib": round(p.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(), "torch_cuda": torch.version.cuda,
    }  # fmt: skip


if __name__ == "__main__":
    found = facts(Path.cwd())
    print(json.dumps(found, indent=1))
    for sentence in remedies(found):
        print(f"note: {sentence}", file=sys.stderr)

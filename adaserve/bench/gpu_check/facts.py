"""What a GPU host has for a first run, and what it lacks; JSON. ``python -m adaserve.bench.gpu_check.facts``

What CUDA's toolkit lacks is linked from other places below ``--toolkit``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from adaserve.bench.gpu_check.toolkit import toolkit
from adaserve.host.description import describe_host, version_of
from adaserve.loadgen.bench import why_not_loaded

TOOLS = ("nvcc", "ninja", "c++", "nvidia-smi")
COMPILERS = TOOLS[:3]
PACKAGES = ("torch", "triton", "transformers", "sglang", "sglang-kernel", "flashinfer-python")
PAIR_GB = 22
"""Of the disk, for the large pair."""


def facts(folder: Path, links: Path) -> dict[str, Any]:
    """JSON values; ``folder``: on the disk in question; ``links``: for a toolkit, where the host's lacks
    something."""
    found = {
        "host": describe_host(),
        "glibc": " ".join(platform.libc_ver()),
        "tools": {name: shutil.which(name) for name in TOOLS},
        "triton": {"cc": _triton_compiler(), "headers": _python_headers()},
        "packages": packages(),
        "cutlass": importlib.util.find_spec("cutlass") is not None,
        "cuda_home": toolkit(links).to_json(),
        "load_generator": why_not_loaded() or "loads",
        "disk_free_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
    }
    return {**found, "cuda": _cuda()}


def remedies(found: dict[str, Any]) -> list[str]:
    """What to do about what is missing."""
    said = []
    missing = {name for name in COMPILERS if found["tools"][name] is None} | {*found["cuda_home"]["missing"]}
    if missing:
        said.append(
            f"{', '.join(sorted(missing))} missing: SGLang and FlashInfer compile kernels, also with "
            "ATTENTION=triton, and may not start without (see kernels)"
        )
    if None in found["triton"].values():
        said.append("Triton compiles with gcc, clang or CC, and with Python.h: no server runs without")
    if found["cuda"] is None:
        said.append("PyTorch sees no GPU: only --device cpu will run")
    if (why := found["load_generator"]) != "loads":
        said.append(f"mixed will fail, since the load generator does not load: {' '.join(why.split())}")
    if found["disk_free_gb"] < PAIR_GB:
        said.append(f"less than {PAIR_GB} GB free: without a large pair that is made already, PAIR=small")
    return said


def _triton_compiler() -> str | None:
    """As Triton looks for it."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def _python_headers() -> str | None:
    folder = sysconfig.get_path("include")
    return folder if Path(folder, "Python.h").exists() else None


def packages() -> dict[str, str | None]:
    """Versions of what computes."""
    return {name: version_of(name) for name in PACKAGES}


def gpu() -> dict[str, Any] | None:
    """What results of one check must have in common; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(0)
    memory_gib = round(p.total_memory / 2**30, 1)
    return {"name": p.name, "memory_gib": memory_gib, "count": torch.cuda.device_count()}


def _cuda() -> dict[str, Any] | None:
    import torch

    if (found := gpu()) is None:
        return None
    capability = list(torch.cuda.get_device_capability())
    return {**found, "capability": capability, "torch_cuda": torch.version.cuda}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toolkit", type=Path, default=Path(".local/cuda"), help="folder of links")
    found = facts(Path.cwd(), parser.parse_args().toolkit.absolute())
    print(json.dumps(found, indent=1))
    for sentence in remedies(found):
        print(f"note: {sentence}", file=sys.stderr)

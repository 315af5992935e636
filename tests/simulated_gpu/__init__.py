"""A CUDA device for hosts that have none: torch, its graphs and SGLang take it for an H100.

It shows what a first run on a GPU would otherwise have to: tensors that meet on two devices, what cannot be
captured, waits, pinned memory that is written or read too early; and it computes right results, so that a
whole server can be compared. It says nothing about speed, and nothing about kernels themselves, which the
CPU's operators stand in for (``operators.py``), with the runtime in ``runtime.cc``.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import torch

from adaserve.bench.gpu_check.toolkit import nvidia_folders

HERE = Path(__file__).resolve().parent
SITE = HERE / "site"
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so",
             "libcaffe2_nvrtc.so")  # fmt: skip
RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"


def environment(folder: Path, report: Path) -> dict[str, str]:
    """Variables of a process that is to see the device; what it is made of is built in ``folder``."""
    _build(folder)
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": f"{folder / RUNTIME}:{folder / DRIVER}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(path),
        "SIMULATED_GPU_REPORT": str(report),
        "TRITON_INTERPRET": "1",
        # SGLang's models then use torch's operators in place of kernels that nvcc would have to compile.
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    }


def counts(report: Path) -> Counter[str]:
    """What all processes have counted by now: launches, waits and races, by name."""
    found: Counter[str] = Counter()
    for path in report.parent.glob(f"{report.name}.*[0-9]"):
        for line in path.read_text().splitlines():
            count, _, what = line.partition("\t")
            found[what] += int(count)
    return found


def written_s(report: Path) -> float:
    """When the oldest report of a process that runs was written, as time.time() says it."""
    paths = report.parent.glob(f"{report.name}.*[0-9]")
    return min(path.stat().st_mtime for path in paths if psutil.pid_exists(int(path.suffix[1:])))


def _build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exports").write_text(f"{RUNTIME} {{ global: *; }};\n")
    source = HERE / "runtime.cc"
    (folder / "refused.cc").write_text(_refused(source.read_text()))
    common = ["c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    _run(
        *common, f"-I{_headers()}", str(source), str(folder / "refused.cc"), "-o", str(folder / RUNTIME),
        f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script={folder / 'exports'}", "-ldl",
    )  # fmt: skip
    _run(
        *common, "-x", "c++", "/dev/null", "-o", str(folder / DRIVER), f"-Wl,-soname,{DRIVER}",
        "-Wl,--no-as-needed", f"-L{folder}", f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip


def _refused(source: str) -> str:
    """Functions that torch and SGLang's kernels are linked with and the simulation lacks: they say so."""
    libraries = [str(Path(torch.__file__).parent / "lib" / name) for name in LIBRARIES]
    libraries += map(str, Path(torch.__file__).parents[1].glob("sgl_kernel/sm90/common_ops*.so"))
    listed = _run("nm", "-D", "--undefined-only", *libraries)
    names = {*re.findall(r" U ((?:__)?cu(?:da)?[A-Z](?!ile)\w+)(?:@\S+)?$", listed, re.MULTILINE)}
    missing = sorted(name for name in names if not re.search(rf"\b{name}\(", source))
    return "\n".join(f'extern "C" int {name}() {{ return 801; }}  // not supported' for name in missing)


def _headers() -> Path:
    found = [place for place in nvidia_folders("include") if (place / "cuda_runtime_api.h").exists()]
    if not found:
        raise FileNotFoundError("no headers of CUDA in NVIDIA's Python packages")
    return found[0]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout

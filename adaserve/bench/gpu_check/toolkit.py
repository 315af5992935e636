"""A CUDA toolkit that kernels can be compiled with, put together where a host's own is incomplete.

SGLang and FlashInfer compile kernels while they serve, with what lies below ``CUDA_HOME``. Some hosts have
parts of a toolkit only: nvcc behind a script, libraries and headers in PyTorch's packages, the driver's
library elsewhere. What is missing in one place is linked from another.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADERS = ("cuda_runtime.h", "cuda_fp16.h", "cublasLt.h")
"""What the kernels of SGLang and FlashInfer that a Llama needs include."""
LIBRARIES = ("libcudart.so", "libcublas.so", "libcublasLt.so", "libnvrtc.so")
"""What kernels may be linked with; those of a Llama need the first one and the driver."""
DRIVER = "libcuda.so"
USUAL_NVCC = "/usr/local/cuda/bin/nvcc"


@dataclass(frozen=True)
class Toolkit:
    """``home``: what CUDA_HOME should be; None = no nvcc. ``missing``: what no place has, by file name."""

    home: Path | None
    missing: Sequence[str]

    def to_json(self) -> dict[str, object]:
        return {"home": str(self.home) if self.home else None, "missing": list(self.missing)}


def toolkit(folder: Path) -> Toolkit:
    """The host's own toolkit if it is whole; else one in ``folder``, of links to what the host has."""
    own = own_home()
    if own is None:
        return Toolkit(None, missing=["nvcc"])
    if not _missing(own):
        return Toolkit(own, missing=[])
    compose(own, folder)
    return Toolkit(folder, missing=_missing(folder))


def own_home() -> Path | None:
    """Where nvcc itself says that it lies; what is on the PATH may be a script that starts another."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(given) / "bin" / "nvcc") if given else shutil.which("nvcc")
    for candidate in (nvcc, USUAL_NVCC):
        if candidate and Path(candidate).exists():
            return _top(candidate)
    return None


def compose(own: Path, folder: Path) -> None:
    """Makes ``folder`` a toolkit of links: the programs of ``own``, headers and libraries of all places."""
    if folder.exists():
        shutil.rmtree(folder)
    stubs = folder / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "include").mkdir()
    for program in filter(Path.is_file, (own / "bin").iterdir()):
        # A link would not do: nvcc looks for its parts where it was called.
        script = folder / "bin" / program.name
        script.write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        script.chmod(0o755)
    if (own / "nvvm").exists():
        (folder / "nvvm").symlink_to(own / "nvvm")
    for place in (own / "include", own / "targets" / "x86_64-linux" / "include", *nvidia_folders("include")):
        if not place.is_dir():
            continue
        for entry in sorted(place.iterdir()):
            _link(folder / "include" / entry.name, entry)
    libraries = [own / "lib64", own / "lib", own / "targets" / "x86_64-linux" / "lib", *nvidia_folders("lib")]
    for name in LIBRARIES:
        if found := _library(name, libraries):
            _link(folder / "lib64" / name, found)
    if found := _library(DRIVER, [p / "stubs" for p in libraries]) or _driver():
        _link(stubs / DRIVER, found)
    else:  # no GPU here: to link with, its name will do
        stub = [
            *("c++", "-shared", "-o", str(stubs / DRIVER), f"-Wl,-soname,{DRIVER}.1", "-Wl,--no-as-needed"),
            *("-x", "c++", "/dev/null"),
        ]
        subprocess.run(stub, check=False, capture_output=True)


def _missing(home: Path) -> list[str]:
    needed = [
        *(home / "include" / name for name in HEADERS),
        home / "lib64" / LIBRARIES[0],
        home / "lib64" / "stubs" / DRIVER,
    ]
    return [path.name for path in needed if not path.exists()]


def _top(nvcc: str) -> Path:
    """From what ``nvcc --dryrun`` would run; where the file lies if it does not say."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as source:
        command = [nvcc, "--dryrun", "-c", "-o", "/dev/null", source.name]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)
    return Path(found[1]).resolve() if found else Path(nvcc).resolve().parent.parent


def nvidia_folders(name: str) -> list[Path]:
    """Folders of that name in NVIDIA's Python packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(place for root in roots for place in Path(root).glob(f"*/{name}") if place.is_dir())


def _driver() -> Path | None:
    """The driver's own library, wherever the loader finds it."""
    try:
        ctypes.CDLL(f"{DRIVER}.1")
    except OSError:
        return None
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((Path(path) for path in mapped if Path(path).name.startswith(DRIVER)), None)


def _library(name: str, places: Iterable[Path]) -> Path | None:
    """A file to link with: ``name``, or ``name`` with a version."""
    for place in places:
        if not place.is_dir():
            continue
        for found in (place / name, *sorted(place.glob(f"{name}.*"))):
            if found.exists():
                return found
    return None


def _link(at: Path, to: Path) -> None:
    if not at.exists():
        at.symlink_to(to.resolve())

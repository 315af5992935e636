"""Compiles the C kernels for this host at first use, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from adaserve.errors import UserError
from adaserve.host.cache import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-pthread",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
)
_HOST_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""Tried one after the other: x86 and recent ARM compilers know -march=native, older ARM ones -mcpu=native."""
_ON_X86 = _HOST_FLAGS[:1]
"""There the others compile for any x86 host, which is several times as slow, and would be kept for good."""
WITHOUT_AVX512 = ("-mno-avx512f",)
"""Flags that leave an x86 host with AVX2."""
_COMPILE_TIMEOUT_S = 120


class BuildError(UserError, RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels, compiled unless this host has done so before; None (and one warning) where that fails."""
    if os.environ.get("ADASERVE_CPU_KERNELS", "1") == "0":
        return None
    try:
        return _loaded()
    except BuildError as error:
        logger.warning("AdaServe's CPU kernels are off; slower torch operators are used instead: %s", error)
        return None


def _loaded() -> ctypes.CDLL:
    """What is in the cache and does not load may be damaged: it is compiled once more, where that works, and
    stays where it does not, since another host may load it. Raises BuildError."""
    path = build()
    try:
        return load_library(path)
    except BuildError as error:
        try:
            again = build(again=True)
        except BuildError as why:
            raise BuildError(f"{error}, and cannot be compiled again: {why}") from why
        return load_library(again)


def build(*extra_flags: str, sources: Path = SOURCES, again: bool = False) -> Path:
    """Path of the compiled kernels in the user's cache. Once there, they need neither a compiler nor a
    writable folder. Safe when several processes build at once. ``again``: even if they are there.
    """
    folder = _kernels_folder()
    target = folder / f"kernels-{_fingerprint(extra_flags, sources)}.so"
    if os.path.exists(target) and not again:  # `Path.exists` raises where a folder above may not be entered
        return target
    compiler = find_compiler()
    _make_writable(folder)
    # Each process compiles under a name of its own; the rename is atomic and the last one wins.
    with _in_the_cache(), tempfile.TemporaryDirectory(dir=folder) as work:
        library = Path(work) / "kernels.so"
        _compile(compiler, extra_flags, sources, library)
        with library.open("rb") as file:  # a machine that loses its power now must not keep half of it
            os.fsync(file.fileno())
        os.replace(library, target)
    return target


@contextmanager
def _in_the_cache() -> Iterator[None]:
    """A full disk, or a folder that is not ours. Raises BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"the cache folder {_kernels_folder()} cannot be written: {error}") from error


def load_library(path: Path) -> ctypes.CDLL:
    """Loads compiled kernels. Raises BuildError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} does not load ({error})") from error


def find_compiler() -> str:
    """Raises BuildError."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C compiler found; install gcc or clang, or set CC")


def _compile(compiler: str, extra_flags: tuple[str, ...], sources: Path, library: Path) -> None:
    message = ""
    for host_flags in _ON_X86 if platform.machine() in ("x86_64", "AMD64") else _HOST_FLAGS:
        flags = (*_FLAGS, *host_flags, *extra_flags)
        command = [compiler, *flags, str(sources / "kernels.c"), "-o", str(library), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler} did not run: {error}") from error
        if done.returncode == 0:
            return
        message = message or done.stderr.strip()
    raise BuildError(f"{compiler} failed: {message[:500]}")


def _fingerprint(extra_flags: tuple[str, ...], sources: Path) -> str:
    """Changes with the sources, the flags and the processor that they were compiled for.

    Not with the compiler: the host that has the compiled kernels may have none.
    """
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join((*_FLAGS, *extra_flags)).encode() + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    # One processor's worth: name and instruction sets, not its current clock rate.
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _kernels_folder() -> Path:
    return cache_folder() / "kernels"


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache folder {folder} cannot be made: {error}") from error
    if not os.access(folder, os.W_OK):
        raise BuildError(f"the cache folder {folder} is read-only; set XDG_CACHE_HOME to a writable folder")

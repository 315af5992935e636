"""A CUDA toolkit from parts of several places."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from adaserve.bench.gpu_check import toolkit as toolkits
from adaserve.bench.gpu_check.facts import remedies
from adaserve.bench.gpu_check.toolkit import toolkit


def put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit whose nvcc is started by a script on the PATH, as some hosts have it, and which has no
    headers of cuBLAS and no libraries with names to link with."""
    home = tmp_path / "cuda-13.0"
    put(
        home / "include" / "cuda_runtime.h",
        home / "include" / "cuda_fp16.h",
        home / "lib" / "libcudart.so.13",
        home / "nvvm" / "libdevice" / "libdevice.10.bc",
    )
    nvcc, script = home / "bin" / "nvcc", tmp_path / "path" / "nvcc"
    for file, line in (
        (nvcc, f'echo "#\\$ TOP={home}/bin/.." >&2; echo compiled'),
        (script, f'exec {nvcc} "$@"'),
    ):
        put(file)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkits, "_driver", lambda: None)
    monkeypatch.setattr(toolkits, "nvidia_folders", lambda name: [])
    return home


@pytest.fixture
def elsewhere(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What PyTorch's packages and the driver bring along."""
    packages, driver = tmp_path / "nvidia" / "cu13", tmp_path / "driver" / "libcuda.so.1"
    put(packages / "include" / "cublasLt.h", packages / "include" / "cuda_fp16.h",
        packages / "lib" / "libcublasLt.so.13", driver)  # fmt: skip
    monkeypatch.setattr(toolkits, "_driver", lambda: driver)
    monkeypatch.setattr(toolkits, "nvidia_folders", lambda name: [packages / name])
    return packages


def test_put_together(own: Path, elsewhere: Path, tmp_path: Path) -> None:
    for _ in range(2):  # again, over what is there
        made = toolkit(tmp_path / "links")
        assert made.home == tmp_path / "links" and made.missing == []
    include, libraries = made.home / "include", made.home / "lib64"
    assert (include / "cublasLt.h").read_text() == str(elsewhere / "include" / "cublasLt.h")
    assert (include / "cuda_fp16.h").read_text() == str(own / "include" / "cuda_fp16.h"), (
        "its own comes first"
    )
    assert (libraries / "libcudart.so").read_text() == str(own / "lib" / "libcudart.so.13")
    assert (libraries / "libcublasLt.so").read_text() == str(elsewhere / "lib" / "libcublasLt.so.13")
    assert (libraries / "stubs" / "libcuda.so").read_text().endswith("libcuda.so.1")
    assert (made.home / "nvvm" / "libdevice" / "libdevice.10.bc").exists()
    ran = subprocess.run([made.home / "bin" / "nvcc"], capture_output=True, text=True, check=True)
    assert ran.stdout == "compiled\n"


def test_its_own_is_used_where_it_is_whole(own: Path, tmp_path: Path) -> None:
    put(
        own / "include" / "cublasLt.h", own / "lib64" / "libcudart.so", own / "lib64" / "stubs" / "libcuda.so"
    )
    made = toolkit(tmp_path / "links")
    assert made.home == own and not (tmp_path / "links").exists()


def test_what_nobody_has_is_named(own: Path, tmp_path: Path) -> None:
    made = toolkit(tmp_path / "links")
    assert list(made.missing) == ["cublasLt.h"]
    assert made.home is not None
    stub = made.home / "lib64" / "stubs" / "libcuda.so"
    named = subprocess.run(["readelf", "-d", stub], capture_output=True, check=True)
    assert b"soname: [libcuda.so.1]" in named.stdout, "where there is no driver, something to link with"


def test_no_compiler(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkits, "USUAL_NVCC", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    made = toolkit(tmp_path / "links")
    assert made.home is None and list(made.missing) == ["nvcc"]


def test_facts_say_what_that_means() -> None:
    found = {"tools": {"nvcc": "/n", "ninja": None, "c++": "/c"}, "cuda_home": {"missing": ["cublasLt.h"]},
             "triton": {"cc": "/g", "headers": None},
             "load_generator": "Traceback:\n  ...\nNo module named 'x'",
             "cuda": {}, "disk_free_gb": 90}  # fmt: skip
    compilers, triton, load = remedies(found)
    assert compilers.startswith("cublasLt.h, ninja missing: SGLang") and "ATTENTION=triton" in compilers
    assert "Python.h" in triton
    assert load.startswith("mixed will fail") and load.endswith("Traceback: ... No module named 'x'")

"""Compiling the kernels, doing without them, and their other vector widths."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.linear import STORAGES
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.logits.logit_transform import LogitTransform
from tests.engine.cpu.factories import Chunk, Pool, hf_model, read_hf, run

BUILD_IN_CHILD = (
    "from adaserve.engine.cpu import build; print(build.load_library(build.build()).ada_vector_lanes())"
)

needs_kernels = pytest.mark.skipif(build.load_kernels() is None, reason="no C compiler here")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def outputs(llama: LlamaModel) -> torch.Tensor:
    pool, tokens = Pool(llama.config, 2), list(range(1, 40))
    return llama.logits(run(llama, pool, [Chunk(tokens, list(range(39)), pool.take(39), [])]))


@pytest.mark.parametrize("storage", STORAGES)
def test_torch_serves_where_no_kernels_are(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model("qwen3")
    expected = outputs(LlamaModel(*read_hf(model), storage="fp32"))
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    llama = LlamaModel(*read_hf(model), storage=storage)  # type: ignore[arg-type]
    assert llama.native is None
    tolerance = 0.5 if storage == "bf16" else 2e-4
    torch.testing.assert_close(outputs(llama), expected, atol=tolerance, rtol=tolerance)
    hidden = torch.randn(3, llama.config.hidden_size)
    logprobs, tokens = llama.topk_logprobs(hidden, LogitTransform.plain(np.ones(3)), 2)
    assert torch.equal(tokens[:, 0], llama.argmax(hidden))
    assert (logprobs <= 0).all()


def test_no_compiler_is_one_warning(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels.__wrapped__() is None
    (record,) = caplog.records
    assert "install gcc or clang" in record.getMessage()


def test_failing_compiler_names_its_complaint(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = empty_cache / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(build.BuildError, match="no such instruction"):
        build.build()
    assert not list(empty_cache.rglob("*.so"))


@needs_kernels
def test_damaged_kernels_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power may leave an empty file: nobody would find out why his server is slow."""
    good = build.build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda *given: shutil.copy(good, given[-1]))
    build.build().write_bytes(b"")
    kernels = build.load_kernels.__wrapped__()
    assert kernels is not None and kernels.ada_vector_lanes() in (4, 8, 16)


@needs_kernels
def test_kernels_that_do_not_load_here_stay_where_there_is_no_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another host, or a start with more memory, may load them."""
    good = build.build()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)

    def refuse(path: Path) -> None:
        raise build.BuildError(f"{path.name} does not load")

    monkeypatch.setattr(build, "load_library", refuse)
    assert build.load_kernels.__wrapped__() is None and good.exists()
    assert "does not load, and cannot be compiled again: no C compiler" in caplog.text


def test_a_full_disk_is_one_warning(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(build, "find_compiler", lambda: "cc")
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", full)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels.__wrapped__() is None
    (record,) = caplog.records
    assert "no space left" in record.getMessage()


def test_switch_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADASERVE_CPU_KERNELS", "0")
    assert build.load_kernels.__wrapped__() is None


@pytest.mark.slow
@needs_kernels
def test_processes_may_build_at_once(empty_cache: Path) -> None:
    command = [sys.executable, "-c", BUILD_IN_CHILD]
    children = [subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE) for _ in range(2)]
    assert all(int(child.communicate()[0]) in (4, 8, 16) for child in children)
    assert [child.returncode for child in children] == [0, 0]
    (library,) = empty_cache.rglob("*.so")
    assert os.listdir(library.parent) == [library.name]


@needs_kernels
def test_compiled_kernels_need_no_compiler_and_no_writable_cache(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.build()
    built.parent.chmod(0o555)
    bare = {"PATH": "", "XDG_CACHE_HOME": str(empty_cache), "HOME": str(empty_cache)}
    child = subprocess.run([sys.executable, "-c", BUILD_IN_CHILD], env=bare, capture_output=True, check=True)
    assert int(child.stdout) in (4, 8, 16)
    monkeypatch.setattr(build.os, "access", lambda *_: False)  # the superuser may write anywhere
    assert build.build() == built


@needs_kernels
def test_a_cache_below_a_folder_of_somebody_else_leaves_the_kernels_off(
    forbidden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower operators compute then; the server must not end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(forbidden / "cache"))
    with pytest.raises(build.BuildError, match="cannot be made"):
        build.build()


@needs_kernels
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("storage", STORAGES)
def test_other_vector_widths(lanes: int, storage: str) -> None:
    kernels = build.load_library(build.build(f"-DVL={lanes}", "-O1", "-Wno-psabi"))
    assert kernels.ada_vector_lanes() == lanes
    weights, config = read_hf(hf_model("qwen2", hidden_size=288))
    llama = LlamaModel(weights, config, storage=storage)  # type: ignore[arg-type]
    expected = outputs(llama)
    llama.held = NativeBackend(kernels, weights, config, storage)  # type: ignore[arg-type]
    if storage == "int8":
        # What falls between two 8-bit numbers may be rounded to either, which moves the logits of its token.
        # How many do depends on both widths, and one of them is the host's.
        moved = (outputs(llama) - expected).abs().amax(1)
        assert int((moved > 2e-4).sum()) <= 10 and float(moved.max()) < 0.5
    else:
        torch.testing.assert_close(outputs(llama), expected, atol=2e-4, rtol=2e-4)

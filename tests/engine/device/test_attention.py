"""The kernels behind tree attention: which one is chosen, and Triton's against SDPA."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.engine.device import attention
from adaserve.engine.device.attention import AttentionBuffers, SdpaKernel, TritonKernel, compiled
from tests.engine.device.factories import CPU

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_reads_our_arrays_as_sdpa_does() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.engine.device.triton_check", *map(str, range(8))]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    worst = [float(x) for x in ran.stdout.split()]
    assert len(worst) == 8 and max(worst) < 1e-5


def refused(*_: Any) -> Any:
    raise RuntimeError("Ninja build failed.\nfatal error: no nvcc")


def test_a_kernel_that_does_not_compile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        name, make = compiled("flashinfer", refused, CPU)
    assert (name, make) == ("triton", TritonKernel)
    assert "no nvcc" in caplog.text and "--adaserve-attention" in caplog.text


def test_a_kernel_that_compiles_serves() -> None:
    def make(buffers: AttentionBuffers, rows: int, place: int) -> SdpaKernel:
        return SdpaKernel(buffers)

    assert compiled("flashinfer", make, CPU) == ("flashinfer", make)


@pytest.mark.parametrize(
    ("setting", "device", "name"),
    [("auto", "cpu", "sdpa"), ("triton", "cpu", "sdpa"), ("triton", "cuda", "triton")],
)
def test_the_setting_chooses(setting: Any, device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.HeadShape, "of", lambda runner: SimpleNamespace())
    assert attention.kernel_maker(setting, None, torch.device(device))[0] == name

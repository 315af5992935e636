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
    assert attention.kernel_maker(setting, None, torch.device(device), 8, 64)[0] == name


def planned_bytes(q_heads: int, kv_heads: int, dim: int, rows: int, tokens: int, tile: int) -> int:
    """What FlashInfer 0.7.2 allocates in its plan on a GPU of 132 SMs, written down from scheduler.cuh."""
    group = q_heads // kv_heads
    tiles = max(2 * 132 // kv_heads, -(-tokens * group // tile) + rows - 1)
    partial = -(-tiles * tile // group)
    return 4 * q_heads * partial * dim + 4 * q_heads * partial + 32


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(32, 8, 128), (32, 32, 128), (40, 40, 128), (14, 2, 64)]
)
@pytest.mark.parametrize(("rows", "tokens"), [(2, 1), (65, 1024), (129, 2048), (257, 4096)])
def test_flashinfer_has_room_for_its_plans(
    q_heads: int, kv_heads: int, dim: int, rows: int, tokens: int, tile: int
) -> None:
    heads = attention.HeadShape(q_heads, kv_heads, dim, 1.0, torch.float16, torch.float16)
    room = attention.workspace_bytes(heads, rows, tokens)
    assert planned_bytes(q_heads, kv_heads, dim, rows, tokens, tile) <= room
    if (kv_heads, rows) == (8, 65):
        assert room == attention.WORKSPACE_BYTES, "nothing more for the models that are served most"

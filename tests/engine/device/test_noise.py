"""The device's noise is the host's: the same hash, bit for bit, and the same numbers but for rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from adaserve import noise as host
from adaserve.engine.device import noise
from adaserve.engine.host.gumbel import read
from adaserve.engine.reading import Reading

ROOT = Path(__file__).resolve().parents[3]
ROWS, VOCABULARY = noise.ROWS_AT_ONCE + 8, 5000
EVERY = torch.arange(VOCABULARY, dtype=torch.int32)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Keys of all 64 bits, the extremes too, and positions from 0 on."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 64, ROWS, dtype=np.uint64)
    keys[:3] = 0, (1 << 64) - 1, 1 << 63
    positions = rng.integers(0, 1 << 17, ROWS)
    positions[:5] = 0, 0, 7, 7, 1 << 31
    return keys, positions


def on_device(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int64))


def test_the_hosts_numbers() -> None:
    keys, positions = rows()
    right = torch.from_numpy(host.gumbel(keys, positions, VOCABULARY))
    got = noise.gumbel(on_device(keys), torch.from_numpy(positions), EVERY)
    assert got.dtype == torch.float32 and got.shape == right.shape
    high = right > -2.0  # all that can decide a draw; below, fp32 has few numbers left to round to
    assert high.float().mean() > 0.99
    torch.testing.assert_close(got[high], right[high], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got, right, rtol=0, atol=0.3)


def test_it_is_gumbel_noise() -> None:
    """Mean, variance and tail; and rows have nothing to do with each other."""
    keys, positions = rows()
    values = noise.gumbel(on_device(keys), torch.from_numpy(positions), EVERY).double()
    assert abs(float(values.mean()) - 0.5772) < 0.01 and abs(float(values.var()) - 1.6449) < 0.03
    assert abs(float((values > 5).double().mean()) - 0.006715) < 0.001
    off_diagonal = torch.corrcoef(values) - torch.eye(ROWS)
    assert float(off_diagonal.abs().max()) < 0.08
    one = torch.full((3,), 5), torch.arange(3)
    assert float((torch.corrcoef(noise.gumbel(*one, EVERY)) - torch.eye(3)).abs().max()) < 0.06


def test_reading() -> None:
    keys, positions = rows()
    logits = torch.randn(ROWS, 131, generator=torch.Generator().manual_seed(0))
    scale, spread = np.linspace(0.5, 2, ROWS, dtype=np.float32), np.zeros(ROWS, np.float32)
    spread[::2] = 0.8
    right = read(logits, Reading(scale, spread, keys, positions))
    columns = (torch.from_numpy(c) for c in (scale, spread))
    got = noise.read(logits.half().float(), *columns, on_device(keys), torch.from_numpy(positions))
    torch.testing.assert_close(got, right, rtol=1e-3, atol=4e-3)
    assert got.argmax(-1).tolist() == right.argmax(-1).tolist()


def test_a_head_reads_the_noise_of_the_tokens_that_it_knows() -> None:
    keys, positions = (torch.from_numpy(v) for v in (rows()[0].view(np.int64), rows()[1]))
    ones, words = torch.ones(ROWS), torch.tensor([4999, 3, 700])
    every = noise.read(torch.zeros(ROWS, VOCABULARY), ones, ones, keys, positions)
    assert torch.equal(noise.read(torch.zeros(ROWS, 3), ones, ones, keys, positions, words), every[:, words])


KERNEL = """
import json, sys
import numpy as np, torch
from adaserve.engine.device import noise
from adaserve.engine.device.noise_kernel import read_fused
from tests.engine.device.test_noise import on_device, rows
keys, positions = rows()
keys, positions = on_device(keys), torch.from_numpy(positions)
spread = torch.full((len(keys),), 0.8)
spread[1::3] = 0
scale = torch.linspace(0.5, 2, len(keys))
worst = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits = torch.randn(len(keys), 1300, generator=torch.Generator().manual_seed(0)).to(dtype)
    right = noise.read(logits, scale, spread, keys, positions)
    got = read_fused(logits, scale, spread, keys, positions)
    assert got.dtype == torch.float32 and torch.equal(got[1::3], right[1::3]), "there is no noise in these"
    assert torch.equal(got.argmax(-1), right.argmax(-1))
    worst.append(float((got - right).abs().max()))
none = torch.zeros(len(keys), 1300), scale, torch.ones(len(keys)), keys, positions
words = torch.randperm(128_000, generator=torch.Generator().manual_seed(1))[:1300]
for some in (None, words):
    worst.append(float((noise.read(*none, words) - read_fused(*none, words)).abs().max()))
print(json.dumps(worst))
"""


SPECIALIZED = """
import inspect, json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from adaserve.engine.device.noise_kernel import BLOCK, _read_row

bind = create_function_from_signature(
    inspect.signature(_read_row.fn), _read_row.params, make_backend(GPUTarget("cuda", 90, 32)))
logits = torch.zeros(4, 1024)
kinds = []
for start in (0, 1):  # at the start of 64 bytes, and behind one number
    floats, ints = torch.zeros(64)[start:], torch.zeros(64, dtype=torch.int64)[start:]
    columns = (floats, floats, ints, ints, ints)
    kinds.append(bind(logits, logits, *columns, *logits.stride(), 1024, BLOCK, False)[1])
print(json.dumps(kinds))
"""


def test_the_kernel_compiles_once_wherever_its_columns_start() -> None:
    """A request that samples would wait for a compiler otherwise: Triton asks whether pointers are multiples
    of 16 bytes, which those into an upload are by chance."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SPECIALIZED]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    aligned, shifted = json.loads(ran.stdout)
    assert aligned == shifted and ["*fp32", "D"] in aligned, "logits are read in large words all the same"


def test_the_kernel_reads_the_same_numbers() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", KERNEL],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    # Noise reaches 22, where a unit in the last place is 2e-6; the hash has to be the same bit for bit.
    assert max(json.loads(ran.stdout)) < 4e-6

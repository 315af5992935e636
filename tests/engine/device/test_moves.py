"""The kernel that moves accepted paths, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHECK = """
import torch
from adaserve.engine.device.move_kernel import BLOCK, PathMover

def check(seed, n, deepest, sizes):
    rng = torch.Generator().manual_seed(seed)
    window = 1 + 3 * deepest
    table = torch.randperm(n * window + 1, generator=rng)[: n * window].view(n, window)
    drawn = torch.rand(n, window - 1, generator=rng).argsort(1)[:, :deepest]
    columns = 1 + drawn.sort(1).values
    wanted = torch.zeros(n, deepest + 1, 2, dtype=torch.int64)  # strided, as verify.moves gives them
    wanted[:, :deepest, 0] = table[:, 1 : 1 + deepest]
    wanted[:, :deepest, 1] = table.gather(1, columns)
    wanted[0, 0] = 0  # nothing was accepted
    target, source = wanted[:, :deepest, 0], wanted[:, :deepest, 1]
    buffers = [torch.randn(n * window + 1, *size, generator=rng).half() for size in sizes]
    right = [buffer.clone() for buffer in buffers]
    for buffer in right:
        buffer[target.flatten()] = buffer[source.flatten()].clone()
    assert not all(map(torch.equal, buffers, right))
    PathMover(buffers).move(target, source)
    assert all(map(torch.equal, buffers, right))

check(0, 3, 4, [(2, 16), (2, 8)])  # keys and values of different size
check(1, 4, 1, [(4 * BLOCK + 4,)])  # more words than one program moves
check(2, 5, 7, [(12,), (4,), (12,)])
try:
    PathMover([torch.zeros(4, 3).half()])
except ValueError as error:
    assert "[6] bytes" in str(error)
else:
    raise AssertionError("entries of 6 bytes were taken")
"""


def test_paths_are_moved() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHECK]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]

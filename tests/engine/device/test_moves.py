"""The kernel that moves accepted paths, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHECK = """
import torch
from adaserve.bench.gpu_check.kernels import check_moves
from adaserve.engine.device.move_kernel import BLOCK, PathMover

for paths, deepest, sizes in (
    (3, 4, (32, 16)),  # keys and values of different size
    (4, 1, (4 * BLOCK + 4,)),  # more words than one program moves
    (5, 7, (12, 4, 12)),
):
    found = check_moves(paths, deepest, sizes, torch.device("cpu"))
    assert found["moved"] and found["right"], found
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

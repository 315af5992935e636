"""Scripts in a process of their own: Triton is told before its import whether to interpret its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulated_gpu import SITE

ROOT = Path(__file__).resolve().parents[3]
QUICK = f"""
import sys
sys.path.append({str(SITE)!r})
from quick_interpreter import quicken
from triton.runtime import interpreter
quicken(interpreter)
"""


def python(script: str, interpret: bool) -> str:
    """What it prints, with Triton's interpreter or with its compiler."""
    env = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1",
           "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-c", QUICK + script if interpret else script]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout

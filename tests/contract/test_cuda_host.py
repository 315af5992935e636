"""The serving path on a CUDA host without ``cutlass``, as far as imports go: nothing here has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.contract.cuda_host import SERVING_PATH

SCRIPT = Path(__file__).with_name("cuda_host.py")


def test_models_can_be_built_without_cutlass() -> None:
    """Without the patch SGLang fails, or the patch would not be needed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        *(f"imported {name}" for name in SERVING_PATH),
        "as it comes: missing cutlass",
        "patched: None",
    ]

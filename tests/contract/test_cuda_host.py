"""The serving path on the bundle's GPU host, as far as imports go: nothing here has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.contract.cuda_host import SERVING_PATH

SCRIPT = Path(__file__).with_name("cuda_host.py")


def test_serving_needs_only_what_is_there() -> None:
    """Models can be built without ``cutlass``, too; as it comes SGLang fails, or it would need no patch."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        *(f"imported {name}" for name in SERVING_PATH),
        "as it comes: missing cutlass",
        "registered: None",
    ]

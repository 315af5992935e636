"""The environment that `make` makes: what it says where it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "env.py"


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {**os.environ, "ADASERVE_ENV": str(tmp_path / "file" / "env")}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and str(tmp_path / "file") in line and "ADASERVE_ENV" in line

"""Compiled loops where nothing can be kept on disk, and where a caller gives them another type."""

from __future__ import annotations

import errno
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config as numba_config
from numba.core.caching import IndexDataCacheFile

from adaserve.scheduler.compiled import INTS, compiled

NOWHERE = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
import numpy as np
from adaserve.scheduler.calibration import path_product

assert path_product(np.array([0.5, 0.5]), np.array([2, 0])).tolist() == [0.5, 0.25]
"""


def test_a_host_without_a_folder_that_can_be_written() -> None:
    ran = subprocess.run([sys.executable, "-c", NOWHERE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_only_what_was_stated_is_taken() -> None:
    """Nothing is compiled for another type while requests wait."""

    @compiled(INTS)
    def total(values: np.ndarray) -> int:
        return int(values.sum())

    fixed = np.arange(8)[::2]
    fixed.flags.writeable = False
    assert total(fixed) == 12
    with pytest.raises(TypeError, match="No matching definition"):
        total(np.arange(4.0))


TOTAL = """
import numpy as np
from adaserve.scheduler.compiled import INTS, compiled

@compiled(INTS)
def total(values):
    return values.sum()

assert total(np.arange(5)) == 10
"""


@pytest.mark.parametrize("harm", ["a full disk", "index", "code"])
def test_what_is_kept_of_compiled_loops_ends_no_start(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that lost its power may leave files without anything in them."""
    monkeypatch.setattr(numba_config, "CACHE_DIR", str(tmp_path / "kept"))
    module = tmp_path / "loops.py"
    module.write_text(TOTAL)
    if harm == "a full disk":
        monkeypatch.setattr(IndexDataCacheFile, "save", full)
    else:
        runpy.run_path(str(module))
        (kept,) = (tmp_path / "kept").rglob("*.nbi" if harm == "index" else "*.nbc")
        kept.write_bytes(b"")
    runpy.run_path(str(module))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")

"""Compiled loops where nothing can be kept on disk, and where a caller gives them another type."""

from __future__ import annotations

import errno
import runpy
from pathlib import Path

import numpy as np
import pytest
from numba.core import config as numba_config
from numba.core.caching import CacheImpl, IndexDataCacheFile

from adaserve.scheduler.compiled import INTS, compiled


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


@pytest.mark.parametrize("harm", ["no folder that can be written", "a full disk", "index", "code"])
def test_what_is_kept_of_compiled_loops_ends_no_start(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that lost its power may leave files without anything in them."""
    monkeypatch.setattr(numba_config, "CACHE_DIR", str(tmp_path / "kept"))
    module = tmp_path / "loops.py"
    module.write_text(TOTAL)
    if harm == "no folder that can be written":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    elif harm == "a full disk":
        monkeypatch.setattr(IndexDataCacheFile, "save", full)
    else:
        runpy.run_path(str(module))
        (kept,) = (tmp_path / "kept").rglob("*.nbi" if harm == "index" else "*.nbc")
        kept.write_bytes(b"")
    runpy.run_path(str(module))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")

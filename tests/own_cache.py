"""A cache of the tests' own: what servers learn here is neither a person's start nor another test's."""

from __future__ import annotations

import os
from pathlib import Path

_REAL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "adaserve"
_SHARED = ("kernels", "pair")
"""What is compiled or made once, and the same for everybody."""


def own_cache(folder: Path) -> str:
    """``folder``, for XDG_CACHE_HOME: nothing was learned there yet."""
    ours = folder / "adaserve"
    ours.mkdir(parents=True, exist_ok=True)
    for name in _SHARED:
        if not (ours / name).is_symlink():
            (_REAL / name).mkdir(parents=True, exist_ok=True)
            (ours / name).symlink_to((_REAL / name).resolve())
    return str(folder)

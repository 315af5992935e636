"""Where AdaServe keeps what it has made, measured or learned on this host."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Everything in it can be deleted (docs/operations.md)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adaserve"

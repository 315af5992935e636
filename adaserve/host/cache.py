"""Where AdaServe keeps what it has made, measured or learned on this host."""

from __future__ import annotations

import os
from pathlib import Path

from adaserve.errors import UserError


def cache_folder() -> Path:
    """The cache folder; everything in it can be deleted (docs/operations.md). Raises UserError if there is no
    home folder and no XDG_CACHE_HOME."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "adaserve"
    try:
        return Path.home() / ".cache" / "adaserve"
    except RuntimeError:
        raise UserError(
            "this user has no home folder: set XDG_CACHE_HOME to a folder for the cache"
        ) from None


def lead_libraries() -> None:
    """Puts SGLang's cache into ours where XDG_CACHE_HOME says where that is.

    SGLang's is below the home folder otherwise, and SGLang cannot be imported where it may not write there.
    Nor can FlashInfer where there is no home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        os.environ.setdefault("SGLANG_CACHE_DIR", str(cache_folder() / "sglang"))
        if os.path.expanduser("~") == "~":
            os.environ["HOME"] = named

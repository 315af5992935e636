"""Writes files atomically: a reader, or a run that continues after a kill, finds the old file or the new one.
And what text files can hold."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""What reading a file of text may raise."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file, or leaves the old one. What is no file of its own (a link, a pipe, ``/dev/stdout``)
    is written to. Raises OSError with a name."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    # Two that write the same file at the same time, perhaps from two containers, must not share this one.
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        error.filename = str(path)  # a full disk doesn't say whose fault it is
        raise
    finally:
        part.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """In UTF-8, whether it says so or not, and gzipped where the name ends in .gz. Raises UNREADABLE."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")


def why_unreadable(error: Exception) -> str:
    """Why a text file could not be read, in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return str((isinstance(error, OSError) and error.strerror) or error)


def json_lines(text: str) -> list[str]:
    """The lines of a file with a JSON object on each. ``str.splitlines`` would cut at U+2028, U+0085 and
    others as well, which JSON lets stand within a text."""
    return text.replace("\r\n", "\n").split("\n")


def not_utf8(text: str) -> str | None:
    """The first character that no file can hold in UTF-8: half a surrogate pair, which JSON can write. None
    without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def write_json(path: Path, value: Any) -> None:
    """Replaces a file of JSON as ``write_atomically`` does; for people to read as well."""
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

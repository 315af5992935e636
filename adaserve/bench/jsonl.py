"""Files with a JSON object per line that outlive the process that writes them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaserve.host.files import json_lines, write_atomically
from adaserve.slo.run_summary import RequestRecord


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line. It is on the disk when this returns, and it stands alone even if the last one was cut
    off."""
    with open(path, "a+b") as f:
        if f.tell() and (f.seek(-1, os.SEEK_END), f.read(1))[1] != b"\n":
            f.write(b"\n")
        f.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the file but those that were cut off; none if there is no file."""
    found = []
    for text in json_lines(path.read_text(encoding="utf-8")) if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    """Writes a gzipped file, without the gaps between chunks; equal records give equal bytes."""
    lines = "".join(replace(r, itl_ms=[]).to_json() + "\n" for r in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(lines.encode(), mtime=0))

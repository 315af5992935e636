"""The folder of a sweep: what was asked for, what is finished, what can be deleted.

``sweep.json`` plan, host, baseline, capacity; ``cases.jsonl`` one line per finished block; ``records/`` the
requests of each; ``prompts.jsonl``; ``work/`` logs and half-finished cases, never kept with results.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaserve.bench.jsonl import append_line, read_lines
from adaserve.bench.sweep.plan import SweepError, SweepPlan
from adaserve.host.files import write_json
from adaserve.slo.run_summary import RequestRecord, read_records

SCHEMA_VERSION = 2
FINISHED = frozenset({"ok", "timeout"})
_UNITED = (
    "axes", "policies", "side_policies", "loads", "shares", "scales", "kinds", "traces", "seeds",
)  # fmt: skip


class Store:
    """Reads and writes the folder. Everything written is whole even when the process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"

    @property
    def exists(self) -> bool:
        return (self.folder / "sweep.json").is_file()

    def refuse_other(self) -> None:
        """Raises SweepError if the folder holds something other than a sweep."""
        if not self.exists and self.folder.exists() and any(self.folder.iterdir()):
            raise SweepError(
                f"{self.folder} holds something other than a sweep: give another folder with --out"
            )

    def create(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / ".gitignore").write_text("*\n")

    def head(self) -> dict[str, Any]:
        """``sweep.json``. Raises SweepError, also for a folder of an older version."""
        try:
            data: dict[str, Any] = json.loads((self.folder / "sweep.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise SweepError(f"{self.folder} holds no sweep: {error.strerror} (sweep.json)") from error
        except ValueError as error:
            raise SweepError(f"{self.folder}/sweep.json is not JSON: {error}") from error
        if data.get("schema_version") != SCHEMA_VERSION:
            raise SweepError(
                f"{self.folder} was measured by an older version, without blocks and TTFT SLOs: draw it with "
                "that version, or give another folder with --out"
            )
        return data

    def write_head(self, head: Mapping[str, Any]) -> None:
        write_json(self.folder / "sweep.json", head)

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    def records_path(self, case_id: str) -> Path:
        return self.folder / "records" / f"{case_id}.jsonl.gz"

    def records(self, case_id: str) -> list[RequestRecord]:
        with gzip.open(self.records_path(case_id), "rt", encoding="utf-8") as f:
            return list(read_records(f))

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends a case."""
        append_line(self.folder / "cases.jsonl", line)

    def cases(self) -> dict[str, dict[str, Any]]:
        """The last line of every case; a line that was cut off is left out."""
        return {line["id"]: line for line in read_lines(self.folder / "cases.jsonl")}

    def finished(self) -> dict[str, dict[str, Any]]:
        """Cases that need not run again."""
        return {k: c for k, c in self.cases().items() if c["status"] in FINISHED}


def changed(name: str, was: str) -> str:
    """What to say when a sweep is to go on with another value of a flag."""
    flag = "--" + name.replace("_", "-")
    return (
        f"{flag}: this sweep was started {was}. Leave the flag out to continue, or give another folder with "
        "--out"
    )


def merged(stored: SweepPlan, given: Mapping[str, Any]) -> SweepPlan:
    """The plan of a folder, continued with flags: values may be added, the traffic can't be changed.

    Raises SweepError."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        old = getattr(stored, name)
        if name in _UNITED:
            changes[name] = tuple(dict.fromkeys((*old, *value)))
        elif name != "check_plain" and value != old:
            raise SweepError(changed(name, f"with {old}"))
        else:
            changes[name] = value
    return replace(stored, **changes)

"""What the page of a load test says of odd runs: rare classes, odd names, figures that round badly."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaserve.loadgen.report import write_report
from adaserve.loadgen.run_folder import Run, read_run
from adaserve.slo.metrics import RequestRecord


def record(number: int, slo_class: str = "coding", **values: Any) -> RequestRecord:
    """A request every half second that meets its SLO."""
    at_s = number / 2
    made = RequestRecord(
        str(number), slo_class, None, 30.0, at_s, at_s, at_s + 0.1, at_s + 0.3, output_tokens=11, **values
    )
    made.judge()
    return made


def folder(path: Path, records: Sequence[RequestRecord], **summary: Any) -> Path:
    path.mkdir(parents=True)
    (path / "requests.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def page_of(runs: Sequence[Run], tmp_path: Path) -> str:
    return write_report(runs, tmp_path / "out", png=False).read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of the table of results."""
    table = page.partition("<tbody>")[2].partition("</tbody>")[0]
    lines = [re.findall(r"<td.*?</td>", row, re.S) for row in table.split("<tr")[1:]]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in line] for line in lines]


def test_each_row_stands_under_its_own_class(tmp_path: Path) -> None:
    few = [record(k) for k in range(4)]
    one = folder(tmp_path / "one", few)
    seeds = [folder(tmp_path / "two-seed0", few), folder(tmp_path / "two-seed1", [*few, record(4, "rare")])]
    page = page_of([read_run(f) for f in (one, *seeds)], tmp_path)
    assert [(row[0], row[1], row[5]) for row in rows(page)] == [
        ("coding", "one", "4"), ("", "two", "4"), ("rare", "two", "1"), ("all", "one", "4"), ("", "two", "4"),
    ]  # fmt: skip

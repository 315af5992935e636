"""The tab in Locust's web UI."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from adaserve.loadgen.recorder import Recorder
from adaserve.loadgen.web_tab import table_csv
from adaserve.slo.run_summary import RequestRecord


def test_a_class_with_a_comma_in_its_name_is_one_cell(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, planned=1)
    record = RequestRecord("0", "chat, long", None, 50.0, 0.0, 0.0, 0.1, 0.9, output_tokens=21)
    record.judge()
    recorder.add(record)
    recorder.close()
    head, *rows = csv.reader(io.StringIO(table_csv(recorder.rows())))
    assert {len(row) for row in rows} == {len(head)}
    assert rows[0][:6] == ["chat, long", "1", "0", "50.0", "40.0", "39.8"]
    assert rows[1][0] == "all" and rows[1][head.index("Attainment (%)")] == "100.0"

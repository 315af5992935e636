"""Our own client against the server that it loads: both count the same requests, and judge them alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from adaserve.loadgen.comparison_table import comparison_rows
from adaserve.loadgen.run_folder import read_run
from adaserve.server import ServerProcess

MIX = """
duration_s: 8
arrivals: {rps: 4}
server: {ignore_eos: true}
classes:
  # Nobody is as fast, not even when a stalled machine delivers many tokens at once.
  coding: {tpot_ms: 0.1, share: 1, output_tokens: 512, prompt_tokens: 40}
  chat: {tpot_ms: 20000, share: 1, output_tokens: 16, prompt_tokens: 40}  # everybody is
  summarization: {tpot_ms: 20000, ttft_ms: 60000, share: 1, output_tokens: 16, prompt_tokens: 40}
"""


def test_client_and_server_agree(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(MIX)
    command = [sys.executable, "-m", "adaserve", "bench", "serve", "--config", "mix.yaml"]
    command += ["--url", server.url, "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 4), done.stderr  # 4: a busy machine sent some requests late
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = {r["name"]: r for r in comparison_rows(read_run(tmp_path / "run"))}
    assert set(rows) == {"coding", "chat", "summarization", "all"}
    for name, row in rows.items():
        of_class = summary["by_class"].get(name, summary)
        # Every answer brought the server's verdict along.
        assert row["client_n"] == row["server_n"] == row["told"] == of_class["requests"] > 5
        assert row["flips"] == 0
        assert row["why"] == ""
        assert abs(row["points"]) <= 1, row
    assert [rows[n]["client"] for n in ("coding", "chat", "summarization")] == [0, 1, 1]
    # The times themselves: what the server did, and what arrived.
    ttft = summary["by_class"]["summarization"]["slo_attainment_by_metric"]["ttft"]
    assert ttft == summary["server"]["custom"]["ttft"]["attainment"] == 1

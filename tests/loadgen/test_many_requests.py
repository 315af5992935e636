"""Ten thousand requests: memory flat, records complete."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_server import running_fake

from adaserve.loadgen.results import iter_records


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_flat(tmp_path: Path) -> None:
    out = tmp_path / "r"
    samples: list[tuple[int, float]] = []
    with running_fake(token_ms=2, first_ms=5) as fake:
        args = ["--rps", "170", "--duration", "60", "--output-tokens", "8", "--baseline-ms", "20"]
        line = [sys.executable, "-m", "adaserve.loadgen", "bench", "serve", "--url", fake.url, *args]
        process = subprocess.Popen([*line, "--out", str(out)], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            samples += sample(process.pid, out)
            time.sleep(1)
    summary = json.loads((out / "summary.json").read_text())
    planned = summary["planned_requests"]
    assert planned > 9_500 and summary["unsent"] == 0
    assert len({r.id for r in iter_records(out)}) == planned
    early = [mib for done, mib in samples if 0.1 < done / planned < 0.3]
    late = [mib for done, mib in samples if 0.8 < done / planned < 1.0]
    assert early and late
    print(f"load generator: {max(early):.0f} MiB early, {max(late):.0f} MiB late")
    assert max(late) < max(early) + 12


def sample(pid: int, out: Path) -> list[tuple[int, float]]:
    """(requests finished, MiB of the process that sends)."""
    try:
        finished = int(json.loads((out / "progress.json").read_text())["finished"])
        children = psutil.Process(pid).children()
        return [(finished, c.memory_info().rss / 2**20) for c in children]
    except (OSError, ValueError, psutil.Error):
        return []

"""Ten thousand requests: memory flat, records complete, nothing lost when the run is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_server import Fake, running_fake

from adaserve.commands import DOES_NOT_COUNT
from adaserve.loadgen.results import iter_records


def start(fake: Fake, out: Path, *args: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "adaserve", "bench", "serve", "--url", fake.url, "--out", str(out)]
    return subprocess.Popen([*line, "--baseline-ms", "20", *args], stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_flat(tmp_path: Path) -> None:
    out = tmp_path / "r"
    samples: list[tuple[int, float]] = []
    with running_fake(token_ms=2, first_ms=5) as fake:
        process = start(fake, out, "--rps", "170", "--duration", "60", "--output-tokens", "8")
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


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_loses_nothing(processes: int, tmp_path: Path) -> None:
    """Hundreds of open streams when Ctrl-C comes: each request that the server got has its record."""
    out = tmp_path / "r"
    with running_fake(token_ms=100, first_ms=100) as fake:
        load = ("--rps", "100", "--duration", "300", "--output-tokens", "30")
        process = start(fake, out, *load, "--processes", str(processes))
        while not (found := sample(process.pid, out)) or found[0][0] < 1_000:
            assert process.poll() is None
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == DOES_NOT_COUNT
        served = {e["id"].removeprefix("bench-") for e in fake.log()}
    records = list(iter_records(out))
    summary = json.loads((out / "summary.json").read_text())
    assert served <= {r.id for r in records}
    assert len(records) == len({r.id for r in records})
    assert sum(r.error == "interrupted" for r in records) > 100
    assert all(r.ok or r.error == "interrupted" for r in records)
    assert summary["requests"] + summary["disconnected"] == len(records)
    assert summary["unsent"] == summary["planned_requests"] - len(records) > 0


def sample(pid: int, out: Path) -> list[tuple[int, float]]:
    """(requests finished, MiB) of each process that the command started."""
    try:
        finished = int(json.loads((out / "progress.json").read_text())["finished"])
        children = psutil.Process(pid).children()
        return [(finished, c.memory_info().rss / 2**20) for c in children]
    except (OSError, ValueError, psutil.Error):
        return []

"""Torch profiles of a running server, and what they say in a few numbers."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from adaserve.bench.gpu_check import answers
from adaserve.server import ServerError, ServerProcess

WAIT_S = 120.0
LONGEST = 12


def profile(
    server: ServerProcess, folder: Path, prompts: Sequence[Sequence[int]], tokens: int, device: str
) -> dict[str, Any]:
    """Records all iterations that ``prompts`` take; the trace's summary. Raises ServerError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    answers.generate(server.url, prompts, 2)  # what is recorded is decoding, not prefills
    on_gpu = device != "cpu"
    # Not for a number of steps: a server that drafts well may need fewer, and would then never end the trace.
    body = {"output_dir": str(folder.resolve()), "activities": ["CPU", "GPU"] if on_gpu else ["CPU"],
            "with_stack": False, "record_shapes": False}  # fmt: skip
    httpx.post(server.url + "/start_profile", json=body, timeout=60.0).raise_for_status()
    before = server.report()["times"]["iterations"]
    answers.generate(server.url, prompts, tokens)
    steps = int(server.report()["times"]["iterations"] - before)
    httpx.post(server.url + "/stop_profile", timeout=WAIT_S).raise_for_status()
    trace = _await_trace(folder)
    return {"trace": trace.name, **summary(trace, "kernel" if on_gpu else "cpu_op", steps)}


def _await_trace(folder: Path) -> Path:
    end_s, last = time.monotonic() + WAIT_S, -1
    while time.monotonic() < end_s:
        for path in folder.glob("*.json*"):
            size = path.stat().st_size
            if size and size == last:
                return path
            last = size
        time.sleep(1.0)
    raise ServerError(f"SGLang wrote no profile to {folder} within {WAIT_S:.0f} s")


def summary(trace: Path, category: str, steps: int) -> dict[str, Any]:
    """Of the events of one category in ``steps`` iterations: how many, how much of the time at least one ran,
    and the longest."""
    data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [e for e in json.loads(data)["traceEvents"] if e.get("cat") == category and "dur" in e]
    if not events:
        raise ServerError(f"{trace} has no events of the kind {category!r}")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    by_name: dict[str, list[float]] = {}
    for e in events:
        by_name.setdefault(e["name"][:120], []).append(e["dur"])
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "events": len(events),
        "steps": steps,
        "events_per_step": len(events) / max(1, steps),
        "busy_share": busy / (end - spans[0][0]) if end > spans[0][0] else None,
        "longest_us": {name: {"calls": len(d), "us": round(sum(d), 1)} for name, d in longest},
    }

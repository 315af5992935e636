"""Client against server: attainment as both counted it, per class, and why it differs.

An AdaServe server sends its own verdict with every answer, so that the two are compared request by
request; its counters also hold the requests whose answers never arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaserve.loadgen.run_folder import Run

CLOSE = 0.05
"""When a request is this close to its SLO, client and server may judge it differently."""
SHOWN = 40
"""Requests that a report lists."""


def comparison_rows(run: Run) -> list[dict[str, Any]]:
    """Attainment as the client and as the server counted it, per class, and why they differ; none without
    server counters.
    """
    server = run.summary.get("server")
    if not isinstance(server, Mapping):
        return []
    rows = []
    for name, c in run.summary["by_class"].items():
        theirs, verdicts = server.get(name, {}).get("all") or {}, run.verdicts[name]
        if not theirs.get("requests") and verdicts.told:
            # The server counts them under "custom", as all that state milliseconds; the answers give the
            # class.
            theirs = {"requests": verdicts.told, "attainment": verdicts.attainment}
        if theirs.get("attainment") is not None and c["slo_attainment"] is not None:
            rows.append(
                {
                    "run": run.label,
                    "name": name,
                    "client": c["slo_attainment"],
                    "server": theirs["attainment"],
                    "client_n": c["requests"],
                    "server_n": theirs["requests"],
                    "points": 100 * (c["slo_attainment"] - theirs["attainment"]),
                    "why": "; ".join(_differences(run, name, theirs["requests"])),
                    "told": verdicts.told,
                    "gap": verdicts.gap,
                    "ttft_gap_ms": verdicts.ttft_gap_ms,
                    "undecided": verdicts.undecided,
                    "flips": len(verdicts.flips),
                }
            )
    return [*rows, _together(rows)] if len(rows) > 1 else rows


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The classes of a run as one row."""
    client_n, server_n = sum(r["client_n"] for r in rows), sum(r["server_n"] for r in rows)
    client = sum(r["client"] * r["client_n"] for r in rows) / client_n
    server = sum(r["server"] * r["server_n"] for r in rows) / server_n
    return {
        "run": rows[0]["run"],
        "name": "all",
        "client": client,
        "server": server,
        "client_n": client_n,
        "server_n": server_n,
        "points": 100 * (client - server),
        "why": "",
        "told": sum(r["told"] for r in rows),
        "gap": None,
        "ttft_gap_ms": None,
        "undecided": sum(r["undecided"] for r in rows),
        "flips": sum(r["flips"] for r in rows),
    }


def flip_rows(run: Run) -> list[dict[str, Any]]:
    """The requests of a run that were judged differently, at most SHOWN."""
    rows = [
        {"run": run.folder.name, "name": name, "flip": f} for name, v in run.verdicts.items() for f in v.flips
    ]
    return rows[:SHOWN]


def _differences(run: Run, name: str, server_n: int) -> list[str]:
    """What the records of a class hold that client and server may count differently."""
    c, arrays, verdicts = run.summary["by_class"][name], run.arrays[name], run.verdicts[name]
    close = np.abs(arrays["ratio"] - 1) <= CLOSE
    if isinstance(c["slo_ttft_ms"], int | float):
        close |= np.abs(arrays["ttft"] * 1e3 / c["slo_ttft_ms"] - 1) <= CLOSE
    found = {
        "judged differently, see below": len(verdicts.flips),
        f"within {CLOSE:.0%} of their SLO": int(close.sum()),
        "failed at the client": c["failed"],
        "more at the server: warm-up, hung up late, or other clients": server_n - c["requests"],
        "never counted by the server: turned away or aborted": c["requests"] - server_n,
    }
    return [f"{n} {what}" for what, n in found.items() if n > 0]

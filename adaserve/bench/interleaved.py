"""Several settings of one server on one schedule, in turns of some seconds.

A machine's speed drifts, and other programs come and go. So the schedule is cut into slices, and every
setting plays a slice before any of them plays the next one, so disturbances affect all alike. A slice ends
when its last request has been answered. Only then does the setting change, so every request is served under
one.
"""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.client import Ask, send
from adaserve.bench.host_contention import HostContention
from adaserve.host.files import write_json
from adaserve.loadgen.bench import refuse_what_ended_early, run_bench
from adaserve.loadgen.config import BenchConfig, TraceSpec
from adaserve.loadgen.preflight import preflight
from adaserve.loadgen.results import iter_records, provenance, write_summary
from adaserve.loadgen.schedule import build_schedule, plan_figures
from adaserve.server import ServerProcess
from adaserve.slo.run_summary import PLAYED, RequestRecord, percent
from adaserve.slo.trace import TraceRow, write_jsonl

TURN_S = 10.0
WARM_REQUESTS, WARM_TOKENS = 4, 16
_TIMES = ("scheduled_s", "sent_s", "first_token_s", "last_token_s", "end_s")

Settings = Mapping[str, Callable[[], None]]
"""Name -> the call that gives the server this setting."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Requests ``first`` to ``last`` of the schedule, which arrive in ``seconds`` from ``start_s`` on."""

    start_s: float
    seconds: float
    first: int
    last: int


def cut(at_s: Sequence[float], seconds: float) -> list[Slice]:
    """An even number of equal slices of about TURN_S; those without a request (``at_s``, ascending) are left
    out."""
    count = max(2, 2 * round(seconds / TURN_S / 2))
    length_s = seconds / count
    bounds = [bisect_left(at_s, k * length_s) for k in range(count + 1)]
    found = [Slice(k * length_s, length_s, bounds[k], bounds[k + 1]) for k in range(count)]
    return [s for s in found if s.first < s.last]


class Interleaved:
    """Plays a schedule on a server, slice by slice under every setting; results below ``folder``."""

    def __init__(self, server: ServerProcess, settings: Settings, config: BenchConfig, folder: Path) -> None:
        self.server, self.settings, self.folder = server, settings, folder
        self.config = preflight(config)
        self.schedule = build_schedule(self.config)
        self.slices = cut([round(r.at_s, 6) for r in self.schedule.requests], config.duration_s)
        self.others = {name: HostContention() for name in settings}
        self._records: dict[str, list[RequestRecord]] = {name: [] for name in settings}
        self._reasons: dict[str, list[str]] = {name: [] for name in settings}
        self._played_s = dict.fromkeys(settings, 0.0)
        self._work = folder / "work"
        self._made = provenance()

    def play(self, console: Console) -> dict[str, dict[str, Any]]:
        """Summaries by setting; a folder of results for each. Raises ServerError, LoadgenError."""
        self._work.mkdir(parents=True)
        rows = [
            TraceRow(r.at_s, r.prompt_tokens, r.max_tokens, r.slo_class, text=r.prompt)
            for r in self.schedule.requests
        ]
        write_jsonl(rows, self.folder / "schedule.jsonl")
        self._warm_up()
        names = list(self.settings)
        for turn, piece in enumerate(self.slices):
            for name in names if turn % 2 == 0 else names[::-1]:
                self._one(name, turn, piece, console)
            shares = ", ".join(f"{n} {percent(_attained(self._records[n]), 0)}%" for n in names)
            console.print(f"turn {turn + 1} of {len(self.slices)}; in time so far: {shares}", highlight=False)
        shutil.rmtree(self._work)
        return {name: self._save(name) for name in names}

    def _warm_up(self) -> None:
        """Fills learned estimates and caches before the first turn, for every setting."""
        for switch in self.settings.values():
            switch()
            first = self.schedule.requests[:WARM_REQUESTS]
            send(self.server.url, [Ask(r.prompt, WARM_TOKENS, r.temperature) for r in first])

    def _one(self, name: str, turn: int, piece: Slice, console: Console) -> None:
        self.server.drain()
        self.settings[name]()
        spec = TraceSpec(path=str(self.folder / "schedule.jsonl"), format="jsonl", start_s=piece.start_s)
        config = self.config.changed(trace=spec, duration_s=piece.seconds)
        out = self._work / f"{turn}-{name}"
        with self.others[name].watched():
            summary = run_bench(config, out, console=console, checked=True)
        refuse_what_ended_early(summary)
        records = list(iter_records(out))
        self._played_s[name] += max(piece.seconds, *(r.end_s or r.sent_s for r in records))
        self._reasons[name] += [f"turn {turn + 1}: {reason}" for reason in summary["invalid_reasons"]]
        self._records[name] += [moved(r, piece) for r in records]

    def _save(self, name: str) -> dict[str, Any]:
        """A folder as the load generator writes it, with the requests of all turns at their planned times."""
        out = self.folder / name
        out.mkdir()
        lines = (r.to_json() + "\n" for r in self._records[name])
        (out / "requests.jsonl").write_text("".join(lines), encoding="utf-8")
        self.config.save(out / "config.yaml")
        write_json(out / "env.json", self._made)
        meta = {
            **{k: self._made[k] for k in ("command", "git_sha")},
            **plan_figures(self.config, self.schedule),
            "turns": len(self.slices),
            PLAYED: round(self._played_s[name], 6),
            "other_programs": round(self.others[name].share, 3),
        }
        return write_summary(out, 0.0, meta, self._reasons[name])


def moved(record: RequestRecord, piece: Slice) -> RequestRecord:
    """A slice's record with its number and times in the whole schedule."""
    times: dict[str, Any] = {k: v if (v := getattr(record, k)) is None else v + piece.start_s for k in _TIMES}
    return replace(record, id=str(int(record.id) + piece.first), **times)


def _attained(records: Sequence[RequestRecord]) -> float:
    return sum(r.attained for r in records) / max(1, len(records))

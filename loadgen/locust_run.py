"""The load test as Locust sees it: one run object per role (local, master, worker).

Locust's users are closed loops, so they do nothing here: the schedule is dispatched beside them.
Local: plan, dispatch, record. Master: plan, send each worker its part and one start time, record
what comes back. Worker: dispatch and send the records to the master.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from adaserve.commands import DOES_NOT_COUNT
from adaserve.host.files import write_json
from adaserve.loadgen.config import BenchConfig, Endpoint
from adaserve.loadgen.dispatch import Dispatcher
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.preflight import preflight
from adaserve.loadgen.recorder import LogHistogram, Recorder
from adaserve.loadgen.results import (
    CONFIG,
    check_results_dir,
    make_results_dir,
    provenance,
    shown_path,
    write_summary,
)
from adaserve.loadgen.schedule import PlannedRequest, Schedule, build_schedule, class_counts, plan_figures
from adaserve.loadgen.server_metrics import Samples, learning, scrape, server_side
from adaserve.loadgen.stream import Target
from adaserve.slo.run_summary import RequestRecord, percent
from adaserve.slo.validity import INTERRUPTED, read_too_late

logger = logging.getLogger("adaserve.loadgen")

_LEAD_S = 0.5  # between the start signal and time 0: all workers must have it by then
_BATCH = 200  # planned requests per message to a worker
_FLUSH_S = 0.5
_WORKER_WAIT_S = 60.0
# Ending thousands of open streams takes its time; each of them becomes a record.
_STOP_WORKER_S = 40.0
_STOP_MASTER_S = 50.0
_LOST = "a worker was lost: its requests are missing"


class LocalRun:
    """A run in this process; also what a master has in common with it."""

    patience_s = _STOP_WORKER_S
    """Seconds that ``stop`` waits for the open streams of the run."""

    def __init__(
        self, environment: Environment, config: BenchConfig, out: Path, checked: bool = False
    ) -> None:
        """``checked``: ``config`` went through the preflight already."""
        self.environment = environment
        self.config = config
        self.out = out
        self._checked = checked
        self.done = Event()
        self.recorder: Recorder | None = None
        self.reasons: list[str] = []
        self._dispatcher: Dispatcher | None = None
        self._schedule: Schedule | None = None
        self._before: Samples = {}
        self._finished = False
        self._unwritten = False
        self._stopped = False
        self._read_lag = LogHistogram()

    def start(self) -> None:
        """Runs to the end. Raises LoadgenError before anything is sent."""
        schedule = self._prepare()
        self._dispatcher = Dispatcher(Target(self.config.server), schedule.requests, self._record)
        if self._stopped:  # while it was prepared
            self._dispatcher.stop()
        ticker = gevent.spawn(self._tick)
        try:
            self._dispatcher.run(time.perf_counter() + _LEAD_S)
        finally:
            ticker.kill()
            self._read_lag = self._dispatcher.read_lag
            self.finish()

    def stop(self) -> None:
        """Ends the run early; what was recorded so far is kept."""
        if not self._finished:
            self._stopped = True
            self.reasons.append(INTERRUPTED)
            self._send_no_more()
            self.done.wait(self.patience_s)

    def _send_no_more(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.stop()

    def rows(self) -> list[dict[str, Any]]:
        """The live table of the web UI."""
        return self.recorder.rows() if self.recorder is not None else []

    def abandon(self) -> None:
        """Nothing was sent and nothing will be, so nothing needs to wait for this run to stop."""
        if not self._finished and self.recorder is not None:
            self.recorder.close()
        self._finished = True
        self.done.set()

    def _prepare(self) -> Schedule:
        self._made = provenance()
        if not self._checked:
            check_results_dir(self.out)
            self.config = preflight(self.config)
        schedule = self._schedule = build_schedule(self.config)
        if not self._checked:  # else the caller has made it
            make_results_dir(self.out)
        self.recorder = Recorder(self.out, len(schedule), self.config.warmup_s)
        _without_paths(self.config).save(self.out / CONFIG)
        write_json(self.out / "env.json", self._made)
        self._before = scrape(self.config.server)
        logger.info(
            "%d requests in %.0f s (%s), model %s, results in %s",
            len(schedule),
            schedule.duration_s,
            ", ".join(f"{n} {c}" for n, c in class_counts(schedule.requests).items()),
            self.config.server.model,
            shown_path(self.out),
        )
        return schedule

    def _record(self, record: RequestRecord) -> None:
        self._keep(record)
        fire_stats(self.environment, record)

    def _keep(self, record: RequestRecord, line: str | None = None) -> None:
        """Writes a record. If that fails, say on a full disk, the run ends."""
        assert self.recorder is not None
        try:
            self.recorder.add(record, line)
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                self.reasons.append(f"records could not be written ({error.strerror})")
                gevent.spawn(self._send_no_more)  # it ends the greenlet that is here, too

    def _tick(self) -> None:
        while True:
            gevent.sleep(_FLUSH_S)
            if self.recorder is not None:
                self.recorder.write_progress()

    def finish(self) -> None:
        """Closes the files and writes ``summary.json``; once."""
        if self._finished or self.recorder is None or self._schedule is None:
            self.done.set()
            return
        self._finished = True
        self.recorder.close()
        try:
            meta = self._meta(self._schedule)
            reasons = [*self.reasons, *read_too_late(self._read_lag.percentile(99))]
            summary = write_summary(self.out, self.config.warmup_s, meta, reasons)
            self.recorder.write_progress()
            for reason in summary["invalid_reasons"]:
                logger.warning("this run is not valid: %s", reason)
                self.environment.process_exit_code = DOES_NOT_COUNT
            shown = shown_path(self.out)
            logger.info("%s; results: %s, page: adaserve report %s", _outcome(summary), shown, shown)
        finally:
            self.done.set()

    def _meta(self, schedule: Schedule) -> dict[str, Any]:
        server = self.config.server
        after = scrape(server)
        return {
            "git_sha": self._made["git_sha"],
            "command": self._made["command"],
            **plan_figures(self.config, schedule),
            "prompts": shown_path(schedule.prompts_source),
            "api": server.api,
            "read_lag_ms": {"median": self._read_lag.percentile(50), "p99": self._read_lag.percentile(99)},
            "server": server_side(self._before, after),
            "learning": learning(after),
        }


def _outcome(summary: Mapping[str, Any]) -> str:
    """In one line, beside Locust's own tables, which know nothing of SLOs."""
    parts = {**summary["by_class"], "all": summary}
    shares = {name: c["slo_attainment"] for name, c in parts.items() if c["slo_attainment"] is not None}
    told = ", ".join(f"{name} {percent(share)}%" for name, share in shares.items())
    return f"met all SLOs: {told or 'nobody was judged'}"


def _without_paths(config: BenchConfig) -> BenchConfig:
    """The configuration as it stays with the results."""
    trace, prompts = config.trace, config.prompts
    return config.changed(
        trace=trace and trace.changed(path=shown_path(trace.path)),
        prompts=prompts and shown_path(prompts),
        tokenizer=config.tokenizer and shown_path(config.tokenizer),
    )


class MasterRun(LocalRun):
    """Plans and records; the workers send."""

    patience_s = _STOP_MASTER_S

    def __init__(
        self, environment: Environment, config: BenchConfig, out: Path, checked: bool = False
    ) -> None:
        super().__init__(environment, config, out, checked)
        runner = environment.runner
        assert isinstance(runner, MasterRunner)
        self.runner = runner
        self._waiting: dict[str, int] = {}  # worker -> its index, until it is done
        self._ready: set[str] = set()
        self._all_ready = Event()
        self._all_done = Event()

    def start(self) -> None:
        schedule = self._prepare()
        workers = self._alive()
        self._waiting = {client: index for index, client in enumerate(workers)}
        ticker = gevent.spawn(self._tick)
        try:
            for client, index in list(self._waiting.items()):
                self._send_shard(client, index, schedule.shard(index, len(workers)))
            if not self._all_ready.wait(_WORKER_WAIT_S):
                raise LoadgenError("some workers did not take their part of the schedule in time")
            if self._stopped:
                return
            t0_epoch = time.time() + _LEAD_S
            for client in workers:
                self.runner.send_message("adaserve_go", {"t0": t0_epoch}, client)
            self._wait_for_workers()
        finally:
            ticker.kill()
            self.finish()

    def stop(self) -> None:
        super().stop()
        self.finish()  # also if a worker has not answered

    def _send_no_more(self) -> None:
        for client in list(self._waiting):
            self.runner.send_message("adaserve_stop", {}, client)

    def _send_shard(self, client: str, index: int, shard: tuple[PlannedRequest, ...]) -> None:
        begin = {"server": self.config.server.model_dump(), "index": index, "expected": len(shard)}
        self.runner.send_message("adaserve_begin", begin, client)
        for k in range(0, len(shard), _BATCH):
            rows = [asdict(r) for r in shard[k : k + _BATCH]]
            self.runner.send_message("adaserve_rows", {"rows": rows}, client)

    def _wait_for_workers(self) -> None:
        while not self._all_done.wait(1.0):
            alive = self._alive()
            for client in self._waiting.keys() - alive:
                self.reasons.append(_LOST)
                del self._waiting[client]
            if not self._waiting:
                return

    def _alive(self) -> list[str]:
        """Locust remembers a worker that it has lost for another minute."""
        return [c.id for c in self.runner.clients.all if c.state != STATE_MISSING]

    def on_ready(self, client: str) -> None:
        self._ready.add(client)
        if self._ready >= set(self._waiting):
            self._all_ready.set()

    def on_records(self, lines: list[str]) -> None:
        if self._finished:
            return
        for line in lines:
            self._keep(RequestRecord.from_mapping(json.loads(line)), line)

    def on_done(self, client: str, read_lag: list[tuple[int, int]], stopped: bool) -> None:
        """``stopped``: it has not sent all of its part. If nobody here has said so, its own user did."""
        if stopped and not self.reasons:
            self.reasons.append(_LOST)
        self._read_lag.merge(read_lag)
        self._waiting.pop(client, None)
        if not self._waiting:
            self._all_done.set()


class WorkerRun:
    """Sends one part of the schedule for a master."""

    def __init__(self, environment: Environment, server: Endpoint, index: int, expected: int) -> None:
        """``expected``: requests of that part."""
        runner = environment.runner
        assert isinstance(runner, WorkerRunner)
        self.environment, self.runner, self.index = environment, runner, index
        self.server, self._expected = server, expected
        self._requests: list[PlannedRequest] = []
        self._lines: list[str] = []
        self._dispatcher: Dispatcher | None = None
        self._runs, self._stopped, self._done = False, False, Event()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Takes requests, and tells the master when these are all."""
        self._requests += [PlannedRequest(**r) for r in rows]
        if len(self._requests) < self._expected:
            return
        self._dispatcher = Dispatcher(Target(self.server), self._requests, self._record, self.index)
        self.runner.send_message("adaserve_ready", {})

    def go(self, t0_epoch: float) -> None:
        """Runs to the end and reports."""
        assert self._dispatcher is not None
        self._runs = True
        flusher = gevent.spawn(self._flush_often)
        try:
            self._dispatcher.run(time.perf_counter() + t0_epoch - time.time())
        finally:
            flusher.kill()
            self._flush()
            lag = list(self._dispatcher.read_lag.counts.items())
            self.runner.send_message("adaserve_done", {"read_lag": lag, "stopped": self._stopped})
            self._done.set()

    def stop(self) -> None:
        if self._dispatcher is not None and not self._done.is_set():
            self._stopped = True
            self._dispatcher.stop()
            if self._runs:  # else it ends as soon as it begins, if it does
                self._done.wait(_STOP_WORKER_S)
                gevent.sleep(0.2)  # lets the socket send the tail before Locust closes it

    def _record(self, record: RequestRecord) -> None:
        self._lines.append(record.to_json())
        fire_stats(self.environment, record)

    def _flush_often(self) -> None:
        while True:
            gevent.sleep(_FLUSH_S)
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self.runner.send_message("adaserve_records", {"lines": lines})


def fire_stats(environment: Environment, record: RequestRecord) -> None:
    """Locust's own statistics: a few events per request, named after the class."""
    if not record.judged:
        return
    error = None if record.ok else RuntimeError(record.error)
    values = {
        "TTFT": record.ttft_s,
        "TPOT": record.tpot_s,
        "E2E": record.e2e_s if record.ok else (record.end_s or record.sent_s) - record.sent_s,
        "LAG": max(0.0, record.lag_s),
    }
    for kind, value in values.items():
        if value is not None:
            environment.events.request.fire(
                request_type=kind,
                name=record.slo_class,
                response_time=value * 1e3,
                response_length=record.output_tokens if kind == "E2E" else 0,
                exception=error if kind == "E2E" else None,
                context={},
            )

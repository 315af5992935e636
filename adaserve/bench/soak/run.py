"""Runs a soak: starts server and clients, disturbs both, checks what must hold, and writes the record."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from adaserve.bench.display import progress
from adaserve.bench.prompts import held_out
from adaserve.bench.soak.clients import Role
from adaserve.bench.soak.invariants import (
    TOKENS,
    MemorySample,
    ServerCounts,
    count_faults,
    idle_faults,
    log_faults,
    memory_growth,
    process_fault,
    snapshot_faults,
)
from adaserve.bench.soak.mix import CLIENTS, greedy_cases
from adaserve.bench.soak.processes import ClientProcesses, Victim
from adaserve.bench.soak.report import Record, record_of, write
from adaserve.bench.soak.server import ENVIRONMENT, Control, references, soak_spec
from adaserve.bench.soak.tally import Tally
from adaserve.bench.soak.watch import Prober, memory
from adaserve.bench.start_server import running_server
from adaserve.loadgen.results import provenance
from adaserve.pair.vocabulary import VOCAB_SIZE
from adaserve.server import ServerError, ServerProcess
from adaserve.slo.classes import DEFAULT_CLASS

STEP_S = 0.25
TEXTS = 60


@dataclass(frozen=True)
class SoakPlan:
    """How long, how hard, and what is disturbed how often."""

    minutes: float | None = None
    requests: int | None = None
    workers: int = 4  # HTTP processes of the server
    clients: int = 3  # client processes
    lanes: int = 12  # calls that each of them has under way
    learn: bool = False  # the draft, from what is served
    seed: int = 0
    cases: int = 64
    quiet_s: float = 120.0  # between two quiet points
    change_s: float = 4.0  # between two changes of policy or prefills
    kill_s: float = 6.0  # between two clients that are killed
    memory_s: float = 10.0
    deadline_s: float = 120.0  # for any answer; longer is a hang

    def done(self, seconds: float, requests: int) -> bool:
        enough = self.requests is not None and requests >= self.requests
        return enough or (self.minutes is not None and seconds >= 60 * self.minutes)


class _EndedError(Exception):
    """The server is gone; there is nothing left to check."""


@dataclass
class Soak:
    """A soak that is under way."""

    plan: SoakPlan
    server: ServerProcess
    control: Control
    clients: ClientProcesses
    prober: Prober
    made: dict[str, Any] = field(default_factory=provenance)  # the commit that was started from
    tally: Tally = field(default_factory=Tally)
    samples: list[MemorySample] = field(default_factory=list)
    changes: int = 0
    quiet_points: int = 0
    _log_at: int = 0
    _victims: list[Victim] = field(default_factory=list)
    _due: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self.before = ServerCounts.of(self.control.metrics())
        self.started_s = time.monotonic()
        self.clients.go()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def step(self) -> bool:
        """Does what is due now; whether that was a quiet point. Raises _EndedError."""
        self.collect()
        if not self.server.alive:
            self._violate("server", f"the server ended: {self.server.why()[-1500:]}")
            raise _EndedError
        for victim in self._victims:
            victim.step()
        self._victims = [v for v in self._victims if not v.ended]
        if self._is_due("memory", self.plan.memory_s, at_once=True):
            self._sample()
        if self._is_due("change", self.plan.change_s):
            self._change()
        if self._is_due("kill", self.plan.kill_s):
            self._victims.append(Victim(self.server.spec.port, self.tally))
        if not self._is_due("quiet", self.plan.quiet_s):
            return False
        self.quiet_point()
        self.prober.go()
        self.clients.go()
        return True

    def collect(self) -> None:
        """Takes in what others have counted."""
        self.tally.add(self.clients.take())
        self.tally.add(self.prober.take())

    def _is_due(self, name: str, every_s: float, at_once: bool = False) -> bool:
        last = self._due.setdefault(name, 0.0 if not at_once else -every_s)
        if self.seconds - last < every_s:
            return False
        self._due[name] = self.seconds
        return True

    def _sample(self) -> None:
        try:
            self.samples.append(memory(self.server.pid))
        except psutil.NoSuchProcess:
            return  # the next step says that the server ended
        if fault := process_fault(self.samples[0], self.samples[-1]):
            self._violate("server", fault)

    def _change(self) -> None:
        setting = self.control.any_setting()
        try:
            self.control.set(setting)
            self.changes += 1
        except (ServerError, httpx.HTTPError) as error:
            self._violate("statuses", f"{setting}: {error!r}")

    # -- quiet points -------------------------------------------------------------------------

    def quiet_point(self) -> None:
        """Lets all requests end and checks that nothing is left of them."""
        self.end_victims()
        self.prober.pause()
        if not self.clients.pause(2 * self.plan.deadline_s):
            self._violate("hang", "a client still waits for an answer after everybody else had theirs")
        self.collect()
        try:
            self._check_quiet()
        except httpx.HTTPError as error:
            self._violate("hang", f"at a quiet point: {error!r}")
        self.quiet_points += 1

    def end_victims(self) -> None:
        for victim in self._victims:
            victim.kill()
        self._victims = []

    def _check_quiet(self) -> None:
        control = self.control
        if still := control.await_idle():
            self._violate("slots", f"after all clients had their answers or left: {still}")
        filled = control.fill()
        self.tally.served[DEFAULT_CLASS] += len(filled)
        self.tally.served_tokens[DEFAULT_CLASS] += sum(filled)
        if still := control.await_idle() or control.flush():
            self._violate("slots", f"the prefix cache can't be emptied: {still}")
        for fault in idle_faults(control.load()):
            self._violate("slots", fault)
        snapshot = control.snapshot()
        counts = ServerCounts.of(control.metrics())
        for fault in [*count_faults(self.before, counts, self.tally), *snapshot_faults(snapshot, counts)]:
            self._violate("counters", fault)
        self._check_log()

    def _check_log(self) -> None:
        with self.server.log.open(errors="replace") as log:
            log.seek(self._log_at)
            new = log.read()
            self._log_at = log.tell()
        for fault in log_faults(new):
            self._violate("log", fault)

    def finish(self) -> None:
        """The last quiet point, and the judgement of memory."""
        self.quiet_point()
        self._sample()
        for growth in memory_growth(self.samples):
            if growth.fault is not None:
                self._violate("memory", growth.fault)

    def _violate(self, invariant: str, text: str) -> None:
        self.tally.violate(invariant, text, time.time())


def run_soak(plan: SoakPlan, out: Path, console: Console) -> Record:
    """Ends after the planned time or number of requests, or at Ctrl-C; the record is written in any case.

    Raises ServerError when the server can't be started."""
    texts = tuple(held_out(plan.seed)[:TEXTS])
    cases = greedy_cases(texts, plan.seed, plan.cases)
    spec = soak_spec(out, plan.workers, plan.learn, plan.seed)
    with running_server(spec, out / "server.log", console, ENVIRONMENT) as server:
        rng = random.Random(plan.seed)
        control = Control(server.url, plan.deadline_s, rng)
        control.set("policy=none")
        with console.status("taking the reference answers"):
            answers = references(server, cases)
        control.set("policy=priced")
        roles = [
            Role(
                server.url,
                CLIENTS * plan.seed + number,
                plan.lanes,
                texts,
                answers,
                VOCAB_SIZE,
                plan.deadline_s,
            )
            for number in range(plan.clients)
        ]
        with ClientProcesses(roles) as clients, Prober(server.url, plan.deadline_s) as prober:
            soak = Soak(plan, server, control, clients, prober)
            record = _record(soak, _drive(soak, out, console))
            write(record, out)
            return record


def _drive(soak: Soak, out: Path, console: Console) -> bool:
    """Whether it was stopped before its time. Ctrl-C and SIGTERM end it in order; what was found until the
    last quiet point is on disk in any case."""
    plan = soak.plan
    soak.start()
    bar = progress(console)
    total = plan.requests if plan.requests is not None else round(60 * (plan.minutes or 0))
    task = bar.add_task("requests" if plan.requests is not None else "seconds", total=total)
    interrupted = False
    try:
        with bar:
            while not plan.done(soak.seconds, soak.tally.total):
                if soak.step():
                    write(_record(soak, interrupted=True), out)
                done = soak.tally.total if plan.requests is not None else soak.seconds
                bar.update(task, completed=min(done, total), description=_status(soak))
                time.sleep(STEP_S)
    except (KeyboardInterrupt, SystemExit):
        console.print("stopping: the running requests may finish, then the report is written")
        interrupted = True
    except _EndedError:
        return True
    finally:
        soak.end_victims()
    try:
        soak.finish()
    except (KeyboardInterrupt, SystemExit):
        console.print("stopped at once; the last checks were left out")
    return interrupted


def _status(soak: Soak) -> str:
    broken = soak.tally.violated.total()
    rate = soak.tally.total / max(1.0, soak.seconds)
    return f"{soak.tally.total} requests, {rate:.0f}/s, {broken} violations"


def _record(soak: Soak, interrupted: bool) -> Record:
    extra: dict[str, Any] = {
        "policy_changes": soak.changes,
        "quiet_points": soak.quiet_points,
        "probes": soak.prober.probes,
        "longest_probe_s": round(soak.prober.longest_s, 2),
    }
    # A server that is dead or hangs is in the record already, which must be written all the same.
    with suppress(httpx.HTTPError):
        extra["learning"] = soak.control.snapshot()["learning"]
        extra["retractions"] = soak.control.total("sglang:num_retracted_requests_total")
        extra["server_output_tokens"] = soak.control.total(TOKENS)
    return record_of(
        made=soak.made, plan=asdict(soak.plan), tally=soak.tally, samples=soak.samples, seconds=soak.seconds,
        extra=extra, interrupted=interrupted,
    )  # fmt: skip

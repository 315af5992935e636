"""Runs the blocks of a sweep unattended: resumable, with a time limit, and through deaths of the server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from adaserve.bench.client import Ask, batch
from adaserve.bench.host_contention import BUSY, SLOW
from adaserve.bench.jsonl import write_records
from adaserve.bench.sweep import servers
from adaserve.bench.sweep.eta import Eta
from adaserve.bench.sweep.measure import host_load, run_case
from adaserve.bench.sweep.plan import Case, Point, SweepError, SweepPlan
from adaserve.bench.sweep.prompts import PromptPool, screened_pool
from adaserve.bench.sweep.requests import Requests, load_workload
from adaserve.bench.sweep.servers import Servers
from adaserve.bench.sweep.store import SCHEMA_VERSION, Store, changed
from adaserve.bench.sweep.systems import PLAIN, System, system
from adaserve.bench.sweep.ttft import PrefillTime
from adaserve.bench.sweep.tuning import setting_of
from adaserve.host.description import describe_host
from adaserve.loadgen.results import command_line
from adaserve.pair.prompts import load_prompts
from adaserve.server import ServerProcess, ServerSpec
from adaserve.slo.classes import TPOT_RANGE_MS
from adaserve.slo.run_summary import RequestRecord, percent
from adaserve.slo.validity import INTERRUPTED

ATTEMPTS = 3
"""How often a block is measured while the host is busy or slow, or the load test is not valid; the least
disturbed attempt counts."""
PATIENCE_S, PAUSE_S = 40.0, 4.0
"""How long a block waits for a host that is slow right now, and how often it looks. Half as long after a wait
in vain: a host that stays slow costs little."""
_FAILURES_IN_A_ROW = 3


@dataclass
class Sweep:
    """One call of ``adaserve bench sweep``."""

    store: Store
    plan: SweepPlan
    spec: ServerSpec
    console: Console
    settings: Mapping[str, Any]  # flags that the server is started with, for continuing
    baseline_ms: float | None = None  # given by the user
    capacity_rps: float | None = None
    minutes: float | None = None
    attempts: int = ATTEMPTS

    def __post_init__(self) -> None:
        self.clock, self.patience_s = Eta(self.plan.seconds), PATIENCE_S

    def run(self) -> bool:
        """Measures what is missing; True when everything is there. Raises SweepError, ServerError,
        LoadgenError, KeyboardInterrupt; finished cases are kept whatever happens."""
        self.deadline_s = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        self.workload = load_workload(self.plan)
        self.store.create()
        self.head = self._stored_head() if self.store.exists else self._new_head()
        self.head["plan"] = self.plan.to_json()
        self.head["server_settings"] = self.settings
        self.head["commands"] = list(dict.fromkeys([*self.head["commands"], command_line()]))
        self.store.write_head(self.head)  # from now on the folder can be continued
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} blocks"),
            TimeElapsedColumn(),
        )
        with (
            Progress(*columns, console=self.console, refresh_per_second=1, transient=True) as bar,
            Servers(self.spec, self.store.work) as up,
        ):
            self.bar, self.servers = bar, up
            self.task = bar.add_task("starting", total=len(self.plan.blocks_in_order()))
            self._prepare()
            self._cases(self.plan.blocks_in_order(), retry=True)
        return not self._missing(self.plan.blocks_in_order())

    def _stored_head(self) -> dict[str, Any]:
        """``sweep.json`` of a folder that is continued. Raises SweepError if its blocks and new ones could
        not be compared."""
        head = self.store.head()
        for name, given in (("baseline_ms", self.baseline_ms), ("capacity_rps", self.capacity_rps)):
            if given is not None and given != head.get(name, given):
                raise SweepError(changed(name.removesuffix("_rps"), f"with {head[name]:g}"))
        now, begun = describe_host(), head["host"]
        for name in ("cpu", "usable_cores"):
            if now[name] != begun[name]:
                raise SweepError(
                    f"this sweep was started on another host ({name.replace('_', ' ')}: {begun[name]}, here "
                    f"{now[name]}): speeds differ, so give another folder with --out"
                )
        deepest, before = self.spec.config.max_depth, head["server"]["max_depth"]
        if before != deepest:
            raise SweepError(
                f"trees of this sweep had up to {before} levels, and with these systems all would have up to "
                f"{deepest}: leave longer chains out, or give another folder with --out"
            )
        return head

    def _new_head(self) -> dict[str, Any]:
        config = self.spec.config
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench sweep",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "commands": [],
            "host": describe_host(),
            "server": {
                "model": self.spec.model or f"embedded pair, {self.spec.size} parameters",
                "draft": self.spec.draft or "embedded",
                "max_depth": config.max_depth,
                "max_width": config.widest,
                "budget": config.budget,
                "cpu_weights": config.cpu_weights,
                "prefill": config.prefill,
            },
        }

    # -- what is measured once ------------------------------------------------------------------

    def _prepare(self) -> None:
        """Baseline, prompts and capacity, unless a previous call found them."""
        head = self.head
        if not head.get("capacity_rps") or not self.store.prompts.exists():
            if finished := self.store.finished():
                raise _other_requests(len(finished))
            self._say("measuring the baseline, the prompts and the capacity of this host")
            server = self.servers.serve(system(PLAIN))
            self._set_up(server)
            head["latency_model"] = server.report()["latency"]
        self.requests = self._requests()
        self._check_requests()
        self.store.write_head(head)
        if self.plan.check_points and "idle_rounds" not in head:
            self._say("comparing `none` with SGLang without speculation, while both are fresh")
            head["idle_rounds"] = servers.idle_rounds(
                self.servers, self.requests.asks(servers.CAPACITY_REQUESTS)
            )
            self.store.write_head(head)
        slos = self.workload.slo_ms(Point(self.plan.at), head["baseline_ms"])
        prefill = self.requests.prefill
        self._say(
            f"baseline {head['baseline_ms']:.2f} ms per token, capacity {head['capacity_rps']:.2f} requests/s"
            f", prefill {prefill.fixed_ms:.1f} ms + {prefill.per_token_ms:.2f} ms per token; TPOT "
            + ", ".join(f"{n} {'none' if v is None else f'{v:.1f} ms'}" for n, v in slos.items())
        )

    def _check_requests(self) -> None:
        """Raises SweepError if blocks would have other requests or SLOs than those that were played."""
        finished, points = self.store.finished(), set[Point]()
        for case in self.plan.blocks_in_order():
            line = finished.get(case.id)
            if line and case.point not in points:
                points.add(case.point)
                if self.requests.traffic(case).sha256 != line["trace_sha256"]:
                    raise _other_requests(len(finished))

    def _requests(self) -> Requests:
        """With what was measured so far."""
        pool, prefill = PromptPool.load(self.store.prompts), PrefillTime(**self.head["prefill"])
        return Requests(self.plan, self.workload, pool, prefill, self.head, self.store.work)

    def _set_up(self, server: ServerProcess) -> None:
        """What SLOs and loads follow from: the medians of several rounds, which are kept."""
        head, every = self.head, [(p.text, p.tokens) for p in load_prompts()]
        texts = [text for text, tokens in every if 20 <= tokens <= 80]
        servers.unloaded(server, texts[:2])  # first requests of a server are slow
        head["host_before"] = host_load()
        if head["host_before"]["busy"] > BUSY:
            self._say(
                f"[yellow]other programs use {head['host_before']['busy']:.0%} of this machine[/]: SLOs "
                "are multiples of the baseline measured now, so results will be off"
            )
        singles_ms, ttfts_ms, rates_rps = [], [], []
        for k in range(servers.SET_UP_ROUNDS):
            self.bar.update(
                self.task,
                description=f"measuring baseline and capacity, round {k + 1} of {servers.SET_UP_ROUNDS}",
            )
            server.drain()
            singles_ms.append(self.baseline_ms or round(_plausible_ms(servers.unloaded(server, texts)), 4))
            head["baseline_ms"] = statistics.median(singles_ms)
            head["urgent"] = self.workload.urgent(head["baseline_ms"] / 1e3)
            if not k:
                self._find_prompts()
            server.drain()
            tokens, times_ms = servers.prefill_times(server, every)
            ttfts_ms.append(times_ms)
            line = PrefillTime.fitted(tokens, [statistics.median(t) for t in zip(*ttfts_ms, strict=True)])
            head["prefill"] = asdict(line)
            server.drain()
            asks = self._requests().asks(servers.CAPACITY_REQUESTS)
            rates_rps.append(self.capacity_rps or round(servers.saturated_rps(server, asks), 4))
        head["capacity_rps"] = statistics.median(rates_rps)
        head["set_up_rounds"] = {"baseline_ms": singles_ms, "capacity_rps": rates_rps}

    def _find_prompts(self) -> None:
        head = self.head
        self.bar.update(self.task, description="looking for prompts whose output does not loop")
        pool, head["prompts_that_do_not_loop"] = screened_pool(
            self.workload, head["urgent"], self._continue, self.plan.seconds / 20.0
        )
        pool.save(self.store.prompts)
        if looping := [n for n, share in head["prompts_that_do_not_loop"].items() if share < 0.5]:
            self._say(
                f"[yellow]most outputs of {', '.join(looping)} repeat themselves[/]: drafts guess that "
                "easily, so speculation looks better than it is; a higher --temperature helps"
            )

    def _continue(
        self, texts: Sequence[str], temperature: float, tokens: int
    ) -> list[tuple[int, Sequence[int]]]:
        server = self.servers.serve(system(PLAIN))
        answers = batch(server.url, [Ask(text, tokens, temperature) for text in texts])
        return [(a["meta_info"]["prompt_tokens"], a["output_ids"]) for a in answers]

    # -- cases ----------------------------------------------------------------------------------

    def _missing(self, cases: Sequence[Case]) -> list[Case]:
        finished = self.store.finished()
        return [c for c in cases if c.id not in finished]

    def _cases(self, cases: Sequence[Case], retry: bool) -> None:
        missing = self._missing(cases)
        if retry and len(missing) < len(cases):
            self._say(f"{len(cases) - len(missing)} of {len(cases)} blocks are there already")
        in_a_row = 0
        for k, case in enumerate(missing):
            self.bar.update(self.task, completed=len(cases) - len(missing) + k, description=case.id)
            if self.deadline_s is not None and time.monotonic() + self.clock.case_s >= self.deadline_s:
                self._say(f"time is up: {len(missing) - k} blocks are left for another call")
                return
            if self._one(case, len(missing) - k - 1):
                in_a_row = 0
            elif (in_a_row := in_a_row + 1) == _FAILURES_IN_A_ROW:
                raise SweepError(
                    f"{in_a_row} blocks in a row failed, the last one with: {self.last_error}. Logs of the "
                    f"server are in {self.store.work}; the same command continues where this one stopped."
                )
        if retry and (failed := self._missing(cases)):
            self._say(f"once more: {len(failed)} blocks that failed")
            self._cases(cases, retry=False)

    def _one(self, case: Case, left: int) -> bool:
        """Measures a block, after which ``left`` others follow; a failure is recorded and the servers are
        started anew for the next one."""
        started, start_s = datetime.now(UTC), time.monotonic()
        try:
            setting = setting_of(case, self.store.finished(), self.plan.lengths)
            line, answers = self._least_disturbed(system(setting), case)
        except Exception as error:
            # Nobody is watching: any error is written down, and the other blocks still run.
            self.last_error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.store.add(
                {
                    **case.names,
                    "status": "failed",
                    "error": self.last_error,
                    "started": started.isoformat(timespec="seconds"),
                }
            )
            self._say(f"[red]{case.id} failed[/]: {escape(self.last_error)}")
            self.servers.stop()
            return False
        write_records(self.store.records_path(case.id), answers)
        self.store.add({**line, "setting": setting})
        self.clock.learn(time.monotonic() - start_s)
        self._say(_one_line(line, left * self.clock.case_s))
        return True

    def _least_disturbed(self, setting: System, case: Case) -> tuple[dict[str, Any], list[RequestRecord]]:
        """The block, again while the host is busy or slow or the load is not the one that was planned; the
        attempt that was disturbed least, a valid one if there is one."""
        warm_up, traffic = self.requests.asks(servers.WARM_REQUESTS), self.requests.traffic(case)
        texts = [str(a.prompt) for a in warm_up]
        tried: list[tuple[tuple[bool, float], dict[str, Any], list[RequestRecord]]] = []
        while len(tried) < self.attempts:
            server = self.servers.serve(setting, warm_up)
            before_ms = self._calm_pace_ms(setting, texts)
            line, answers = run_case(server, case, traffic, self.store.work / "case")
            server.drain()
            paces_ms = before_ms, self.servers.pace_ms(setting, texts)
            slower = max(paces_ms) / self._usual_pace_ms(paces_ms) - 1.0
            line |= {"pace_ms": [round(p, 4) for p in paces_ms], "slower": round(slower, 4)}
            faults = client_faults(line, answers)
            tried.append(((bool(faults), max(line["others"] / BUSY, slower / SLOW)), line, answers))
            if tried[-1][0] <= (False, 1.0):
                break
            self._say(
                f"[yellow]{case.id}: other programs used {line['others']:.0%} of the host, and it was "
                f"{max(0.0, slower):.0%} slower than usual{''.join(f'; {escape(f)}' for f in faults)}[/]"
            )
        _, line, answers = min(tried, key=lambda t: t[0])
        return {**line, "attempts": len(tried)}, answers

    def _calm_pace_ms(self, setting: System, texts: Sequence[str]) -> float:
        """The host's pace right before a block, which waits for it to be as usual, but not for ever."""
        end_s = time.monotonic() + self.patience_s
        while (pace_ms := self.servers.pace_ms(setting, texts)) > self._usual_pace_ms(()) * (1.0 + SLOW):
            if time.monotonic() >= end_s:
                self.patience_s /= 2
                return pace_ms
            self.bar.update(self.task, description=f"the host is slow ({pace_ms:.1f} ms per token): waiting")
            time.sleep(PAUSE_S)
        self.patience_s = PATIENCE_S
        return pace_ms

    def _usual_pace_ms(self, now_ms: Sequence[float]) -> float:
        """ms per token of single requests: the median of all that was measured around blocks."""
        known = [p for line in self.store.finished().values() for p in line["pace_ms"]]
        return statistics.median([self.head["baseline_ms"], *known, *now_ms])

    def _say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, soft_wrap=True)


def _other_requests(finished: int) -> SweepError:
    return SweepError(
        f"requests would not be like those of the {finished} blocks that are there: prompts.jsonl, the SLO "
        "classes or a trace have changed since. Put them back, or give another folder with --out"
    )


def client_faults(line: Mapping[str, Any], answers: Sequence[RequestRecord]) -> list[str]:
    """Why the load test of a block was not valid, by the client's own fault. That a block was cut off, or
    that no request was answered, is what the system did."""
    if not any(r.ok for r in answers):
        return []
    return [reason for reason in line["invalid_reasons"] if reason != INTERRUPTED]


def _plausible_ms(baseline_ms: float) -> float:
    """A baseline that SLOs can be multiples of. Raises SweepError for one that nobody could ask for."""
    if baseline_ms < TPOT_RANGE_MS[0]:
        raise SweepError(
            f"a token of a single request took {baseline_ms:.3f} ms: other programs keep this client from "
            "reading tokens as they come. Wait for a quiet host, or give the baseline with --baseline-ms"
        )
    return baseline_ms


def _one_line(line: dict[str, Any], left_s: float) -> str:
    total = line["all"]
    tpot = total["mean_tpot_ms"]
    return (
        f"{line['id']}: attained {percent(total['slo_attainment'] or 0.0)}%, goodput "
        f"{total['token_goodput'] or 0:.0f} tokens/s, TPOT {'-' if tpot is None else f'{tpot:.1f}'} ms"
        + (f" ([yellow]{escape(line['error'])}[/])" if line["error"] else "")
        + f"; about {left_s / 60:.0f} min left"
    )

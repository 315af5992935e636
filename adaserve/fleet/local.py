"""A fleet on one machine: replicas behind a router that people run (``adaserve fleet up``).

The router is SGLang's own, from the package index. Here it is only started, watched and stopped; how it
routes requests is up to the router.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import httpx

from adaserve.host.cores import usable_cores
from adaserve.server import ServerError, ServerProcess, api_key, bearer, require_free, url_of
from adaserve.slo.resolve import START_PARAMS, START_TEXT

ROUTERS = {"sglang-router": "sglang_router", "smg": "smg"}
"""Package and module of each router that is known to work."""

GRACE_S = 120
"""Seconds that requests in flight have to end when the fleet stops."""

LAST_PORT = 65535
MIN_LIFE_S = 30.0
"""What dies sooner after its start has failed: it is not started again at once."""

RETRY_S = 300.0
"""Between the starts of a replica that fails, while others serve: a start takes much of their processors."""

MAX_LOG_BYTES = 64 << 20
"""Of a log that is written. The health checks of the router alone bring some 10 MB a day."""

BASELINE_FLAGS = ("--baseline-ms", "--adaserve-baseline-ms")
"""Of `adaserve serve`, and the same setting among SGLang's flags."""

_FOLDER_FLAGS = {"--learn-folder", "--adaserve-learn-folder"}
_POLL_S = 0.5
_WARM_REQUESTS = 18  # 126 iterations; a server believes nothing before 64
_FLAGS = {
    "--policy": "cache_aware",
    # By default a prompt follows its prefix until one replica has 64 requests more than another one.
    "--balance-abs-threshold": "4",
    # By default a dead replica is noticed after three minutes, and one that is back after two more. A request
    # that meets a dead one until then is tried again, for three seconds.
    "--health-check-interval-secs": "2",
    "--health-check-timeout-secs": "25",  # a busy replica takes up to 20 s
    "--health-failure-threshold": "1",
    "--health-success-threshold": "1",
    "--retry-initial-backoff-ms": "400",
    # Never: to sglang-router 0.3.2 what a replica refuses (400, 429) is its failure, so that the mistakes of
    # one client would take all replicas away from the others.
    "--cb-failure-threshold": str(2**32 - 1),
    "--log-level": "warn",
    "--shutdown-grace-period-secs": str(GRACE_S),
}

_ADDRESSES = {"--host", "--port", "--worker-urls"}
"""Flags of a router that say where it is asked, and whom it asks."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One ``adaserve serve`` on this machine."""

    port: int
    flags: tuple[str, ...] = ()  # of `adaserve serve`
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.flags)

    def promising(self, baseline_ms: float) -> ReplicaSpec:
        """The same replica with that baseline, unless its flags give one: a class that is a multiple of the
        baseline must be the same SLO on all replicas, and each would measure another one on a busy host."""
        if any(word.partition("=")[0] in BASELINE_FLAGS for word in self.flags):
            return self
        return replace(self, flags=(*self.flags, "--baseline-ms", f"{baseline_ms:.4g}"))

    def command(self) -> list[str]:
        """Its command line."""
        address = ("--host", self.host, "--port", str(self.port))
        return [sys.executable, "-m", "adaserve.cli", "serve", *self.flags, *address]

    def environment(self) -> dict[str, str]:
        """Nothing of its own."""
        return dict(os.environ)


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router in front of the servers at ``workers``."""

    workers: tuple[str, ...]  # their URLs
    name: str = "sglang-router"  # one of ROUTERS
    host: str = "127.0.0.1"
    port: int = 30000
    metrics_port: int = 30100  # of its Prometheus metrics
    extra: tuple[str, ...] = ()  # its own flags, which win; none of its addresses

    def __post_init__(self) -> None:
        if self.name not in ROUTERS:
            raise ServerError(f"unknown router {self.name!r}: choose {' or '.join(ROUTERS)}")
        if find_spec(ROUTERS[self.name]) is None:
            extra = "'adaserve[fleet]'" if self.name == "sglang-router" else self.name
            raise ServerError(f"the router {self.name} is not installed: pip install {extra}")
        if chosen := _ADDRESSES & self._given:
            raise ServerError(
                f"the router's flags may not have {', '.join(sorted(chosen))}: give its address with --host "
                "and --port of `adaserve fleet up`, which also tells it the replicas"
            )

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.extra)

    @property
    def ports(self) -> tuple[int, ...]:
        """Those that it listens on, but for one of its metrics that its own flags choose."""
        return (self.port,) if "--prometheus-port" in self._given else (self.port, self.metrics_port)

    @property
    def _given(self) -> set[str]:
        return {word.partition("=")[0] for word in self.extra}

    def command(self) -> list[str]:
        """Its command line; it ends with the process that started it."""
        flags = {"--host": self.host, "--port": str(self.port), **_FLAGS}
        flags |= {"--prometheus-host": self.host, "--prometheus-port": str(self.metrics_port)}
        given = self._given
        words = [w for flag, value in flags.items() if flag not in given for w in (flag, value)]
        start = [sys.executable, "-m", "adaserve.host.lifetime", f"{ROUTERS[self.name]}.launch_router"]
        return [*start, *words, *self.extra, "--worker-urls", *self.workers]

    def environment(self) -> dict[str, str]:
        """Nothing of its own."""
        return dict(os.environ)


class Fleet:
    """Replicas and a router, as processes: ``up`` starts them, ``down`` stops them."""

    def __init__(self, replicas: Sequence[ReplicaSpec], router: RouterSpec, logs: Path) -> None:
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // len(replicas))))
        self.replicas = [
            ServerProcess(spec, _log(logs, "replica", spec.port), {"OMP_NUM_THREADS": threads})
            for spec in replicas
        ]
        self.router = ServerProcess(router, _log(logs, "router", router.port))
        self._specs = list(replicas)
        self._addresses = [(spec.host, spec.port) for spec in replicas]
        self._addresses += [(router.host, port) for port in router.ports]
        self._router_started_s = 0.0
        self._started_s = [0.0] * len(replicas)
        self._retry_s: dict[int, float] = {}  # when those that failed are started again
        self._starting: set[int] = set()  # those that are started again now
        self._baseline_ms: float | None = None  # of the replica that was started first
        self.notes: list[str] = []  # sentences for those who run it

    @classmethod
    def of(
        cls,
        replicas: int,
        flags: tuple[str, ...],
        logs: Path,
        router: str = "sglang-router",
        router_flags: tuple[str, ...] = (),
        host: str = "127.0.0.1",
        port: int = 30000,
    ) -> Fleet:
        """Equal replicas with the ``flags`` of `adaserve serve`. The router listens on ``port``, the replicas
        on the next ports, and the router's metrics are on the one after those. An API key of the
        replicas is the router's, too. Raises ServerError."""
        if port + 1 + replicas > LAST_PORT:
            raise ServerError(
                f"{replicas} replicas and a router need {replicas + 2} ports: choose a lower --port"
            )
        if any(flag.startswith("--ssl-") for flag in flags):
            raise ServerError("the router asks its replicas without TLS: leave out --ssl-...")
        if replicas > 1 and _FOLDER_FLAGS & {flag.partition("=")[0] for flag in flags}:
            raise ServerError("the replicas cannot keep their drafts in one folder: leave out --learn-folder")
        servers = [ReplicaSpec(port + 1 + i, flags) for i in range(replicas)]
        urls = tuple(server.url for server in servers)
        if (key := api_key(flags)) and not api_key(router_flags):
            router_flags = (*router_flags, "--api-key", key)
        return cls(servers, RouterSpec(urls, router, host, port, port + 1 + replicas, router_flags), logs)

    @property
    def url(self) -> str:
        return self.router.url

    def up(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Returns when the router sends to all replicas. Raises ServerError, with nothing left behind."""
        for host, port in self._addresses:  # the router starts minutes later
            require_free(host, port)
        for process in (*self.replicas, self.router):
            _kept(process.log)  # of the run before, which may tell why that ended
        try:
            # One after the other: each measures how fast it is, and they share the machine.
            for i in range(len(self.replicas)):
                self._start(i, say)
            self._start_router(say)
            self._await_ready(say)
        except BaseException:
            self.down(0.0)
            raise

    def _start_router(self, say: Callable[[str], None]) -> None:
        self.router.start(lambda s: say(f"starting the router ({s:.0f} s)"))
        self._router_started_s = time.monotonic()

    def _start(self, i: int, say: Callable[[str], None]) -> None:
        what = f"replica {i + 1} of {len(self.replicas)}"
        replica = self.replicas[i]
        if self._baseline_ms is not None:
            replica.spec = self._specs[i].promising(self._baseline_ms)
        replica.start(lambda s: say(f"starting {what} ({s:.0f} s)"))
        if self._baseline_ms is None:
            self._baseline_ms = _settled_baseline_ms(replica)
            self._hold_baseline(replica, self._specs[i], self._baseline_ms)
        self._started_s[i] = time.monotonic()

    def _hold_baseline(self, first: ServerProcess, spec: ReplicaSpec, baseline_ms: float) -> None:
        """The other replicas use the baseline that the first one has measured. The first one would go on
        learning, so that a class would soon mean another SLO there. With only an API key, nobody may change a
        running server."""
        if spec.promising(baseline_ms) is spec:
            return
        if api_key(spec.flags) and not api_key(spec.flags, "--admin-api-key"):
            self.notes.append(
                "with --api-key alone the baseline of replica 1 moves with what it learns: give "
                "--admin-api-key or --baseline-ms as well, so that classes mean the same SLOs on all replicas"
            )
            return
        first.fix_baseline(baseline_ms, bearer(spec.flags, "--admin-api-key"))

    def _await_ready(self, say: Callable[[str], None]) -> None:
        end_s = time.monotonic() + 120.0
        while (ready := self.healthy()) < len(self.replicas):
            say(f"the router knows {ready} of {len(self.replicas)} replicas")
            if not self.router.alive:
                raise ServerError(f"the router {self.router.how} while it started:\n{self.router.why()}")
            if time.monotonic() > end_s:
                raise ServerError(f"the router does not send to all replicas; see {self.router.log}")
            time.sleep(_POLL_S)

    def healthy(self) -> int:
        """Replicas that the router sends to; 0 while it does not answer."""
        try:
            answer = httpx.get(self.url + "/workers", timeout=5.0, headers=self.router.spec.headers)
            workers = answer.raise_for_status().json()["workers"]
        except httpx.HTTPError:
            return 0
        return sum(bool(worker["is_healthy"]) for worker in workers)

    def watch(self, say: Callable[[str], None]) -> None:
        """Restarts whatever dies, forever. Raises ServerError when that makes no sense."""
        while True:
            self.repair(say)
            time.sleep(_POLL_S)

    def repair(self, say: Callable[[str], None]) -> None:
        """Restarts dead processes: the router first, because nobody is served without it. It finds replicas
        by itself. Keeps logs from filling the disk. Raises ServerError."""
        self._repair_router(say)
        for i in range(len(self.replicas)):
            if i not in self._starting:
                self._repair_replica(i, say)

    def _repair_router(self, say: Callable[[str], None]) -> None:
        router = self.router
        if router.alive:
            _limit(router.log)
            return
        if _died_soon(router, self._router_started_s):
            raise ServerError(_failed("the router", router))
        say(f"the router {router.how}; starting it again. {_kept(router.log)}")
        router.stop()
        self._start_router(lambda _: None)
        say("the router answers again")

    def _repair_replica(self, i: int, say: Callable[[str], None]) -> None:
        """One that fails is put off, and the others go on."""
        replica, what, now_s = self.replicas[i], f"replica {i + 1}", time.monotonic()
        if replica.alive:
            _limit(replica.log)
            return
        if i not in self._retry_s and _died_soon(replica, self._started_s[i]):
            self._put_off(i, _failed(what, replica), say)
            return
        if now_s < self._retry_s.get(i, 0.0):
            return
        say(f"{what} {replica.how}; starting it again. {_kept(replica.log)}")
        replica.stop()
        self._starting.add(i)
        try:
            # That takes a minute, or ten where it hangs, in which others may die.
            self._start(i, lambda _: self.repair(say))
        except (ServerError, OSError) as error:
            self._repair_router(say)  # it may be what failed
            self._put_off(i, f"{what} cannot be started: {error}", say)
            return
        finally:
            self._starting.discard(i)
        self._retry_s.pop(i, None)
        say(f"{what} answers again")

    def _put_off(self, i: int, why: str, say: Callable[[str], None]) -> None:
        """Raises ServerError where no replica is left to serve."""
        if not any(replica.alive for replica in self.replicas):
            raise ServerError(why)
        self.replicas[i].stop()
        self._retry_s[i] = time.monotonic() + RETRY_S
        say(f"{why}\nTrying again in {RETRY_S / 60:.0f} minutes; the others serve.")

    def down(self, grace_s: float = GRACE_S) -> None:
        """The router takes no more requests and waits for those in flight; then the replicas are stopped."""
        self.router.stop(grace_s)
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(ServerProcess.stop, self.replicas))


def _log(logs: Path, kind: str, port: int) -> Path:
    """By the port, so that several fleets may share a folder."""
    return logs / f"{kind}-{port}.log"


def _died_soon(process: ServerProcess, started_s: float) -> bool:
    """Whether it failed soon after its start. A process that was told to end, and ended in order, has not
    failed."""
    return process.code != 0 and time.monotonic() < started_s + MIN_LIFE_S


def _failed(what: str, process: ServerProcess) -> str:
    return f"{what} {process.how} soon after its start:\n{process.why()}\n(full log: {process.log})"


def _kept(log: Path) -> str:
    """Says where the log of a dead process is from now on. Somebody may have removed it."""
    kept = log.with_suffix(".ended.log")
    try:
        log.replace(kept)
    except OSError as error:
        return f"Its log {log} can't be kept: {error.strerror}"
    return f"Its log until then: {kept}"


def _limit(log: Path) -> None:
    """Moves a large log to ``NAME.earlier.log``, in place of the previous one, and empties it. Its writer
    appends, so it goes on at the new end."""
    with suppress(OSError):  # it was removed, or the disk is full
        if log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(log, log.with_suffix(".earlier.log"))
            os.truncate(log, 0)


def _settled_baseline_ms(replica: ServerProcess) -> float:
    """Milliseconds per token of the idle replica, after some requests: they correct what it measured while it
    started, when the host may have been busy. Without speculation, each token is an iteration, and of those
    it takes many before it believes what it has learned. They are of the kind that is not counted. Raises
    ServerError."""
    body = {"text": START_TEXT, "sampling_params": START_PARAMS}
    headers = {**replica.spec.headers, "x-adaserve-speculation": "off"}
    try:
        for _ in range(_WARM_REQUESTS):
            answer = httpx.post(replica.url + "/generate", json=body, timeout=300.0, headers=headers)
            answer.raise_for_status()
        return float(f"{replica.report()['baseline_ms']:.4g}")
    except httpx.HTTPError as error:
        raise ServerError(f"the first replica does not answer ({error}); see {replica.log}") from error

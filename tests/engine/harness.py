"""Starts real SGLang servers on tiny models and talks to them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from adaserve.host.lifetime import PARENT_ENV
from adaserve.host.ports import free_port

CONTEXT = 256
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 1.0  # SGLang's first process sleeps for five seconds before it ends
PROBE_FOLDER = Path(__file__).parent / "probe"


class Zygote:
    """The process that servers are forked from; a context manager."""

    def __enter__(self) -> Zygote:
        command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).parent / "zygote.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        while (line := self._read()) != "ready":
            assert line or self._process.poll() is None, "SGLang could not be imported"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def fork(self, arguments: list[str], environment: dict[str, str], log: Path) -> int:
        """Process id of a new server, leader of its own session."""
        assert self._process.stdin is not None
        request = {"arguments": arguments, "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Fresh:
    """Starts servers as processes of their own, for what a fork would inherit."""

    def fork(self, arguments: list[str], environment: dict[str, str], log: Path) -> int:
        module = ["-m", "adaserve.host.lifetime", "sglang.launch_server"]
        command = [sys.executable, "-P", "-W", "ignore", *module, *arguments]
        environment = {**environment, PARENT_ENV: str(os.getpid())}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        threading.Thread(target=process.wait, daemon=True).start()
        return process.pid


class Server:
    """One server process; a context manager that stops it. ``arguments``: SGLang's flags without dashes."""

    def __init__(
        self, folder: Path, model: Path, arguments: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = _flags(model, self.port, arguments)
        # SGLang has inductor compile a function at the first repetition penalty: half a minute of gcc.
        base = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        self.environment = {**base, **(environment or {})}
        self.pid: int | None = None

    @contextmanager
    def running(self, zygote: Zygote | Fresh) -> Iterator[Server]:
        self.pid = zygote.fork(self.flags, self.environment, self.log)
        try:
            self._wait_ready()
            yield self
        finally:
            self.stop()

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if not self.alive:
                raise RuntimeError(f"the server ended:\n{self.tail()}")
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"no answer within {START_TIMEOUT_S} s:\n{self.tail()}")

    @property
    def alive(self) -> bool:
        return self.pid is not None and psutil.pid_exists(self.pid)

    def stop(self) -> None:
        """Ends the session that the server opened: its process and its children."""
        assert self.pid is not None
        for sig in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + STOP_TIMEOUT_S
            while self.alive and time.monotonic() < end:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, sig)
                time.sleep(0.05)
        self.pid = None

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def generate(self, **body: Any) -> Any:
        response = self.post("/generate", body)
        assert response.status_code == 200, f"{response.status_code} {response.text}\n{self.tail(3000)}"
        return response.json()

    def internal_state(self) -> dict[str, Any]:
        return dict(httpx.get(self.url + "/server_info", timeout=30).json()["internal_states"][0])

    def assert_idle_and_clean(self) -> None:
        """No KV slot is held by anything once the cache was flushed, and the process is alive."""
        end = time.monotonic() + 30
        response = self.post("/flush_cache")
        while response.status_code != 200 and time.monotonic() < end:
            time.sleep(0.3)
            response = self.post("/flush_cache")
        assert response.status_code == 200, response.text + self.tail(3000)
        log = self.log.read_text(errors="replace")
        for words in ("memory leak", "Scheduler hit an exception"):
            assert words not in log, self.tail()


def _flags(model: Path, port: int, arguments: dict[str, Any]) -> list[str]:
    settings: dict[str, Any] = {
        "model-path": model, "device": "cpu", "dtype": "float32", "context-length": CONTEXT, "port": port,
        "max-total-tokens": 20000, "mem-fraction-static": 0.2, "chunked-prefill-size": 64,
        "skip-server-warmup": True, "log-level": "info", "random-seed": 1, "watchdog-timeout": 120,
        "sleep-on-idle": True, **arguments,
    }  # fmt: skip
    flags: list[str] = []
    for name, value in settings.items():
        if value is False or value is None:
            continue
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


@dataclass
class Probe:
    """The probe plugin's switches and the file that it reports to."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        info = self.folder / "adaserve_probe-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adaserve-probe\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nprobe = adaserve_probe:register\n")
        path = [str(self.folder), str(PROBE_FOLDER), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "ADASERVE_PROBE": json.dumps({"out": str(self.folder / "stats.json"), **self.options}),
        }

    def read(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "stats.json").read_text()))


@dataclass(frozen=True)
class Job:
    """One request of a workload."""

    input_ids: tuple[int, ...]
    params: dict[str, Any]
    arrival_s: float = 0.0
    disconnect_after: int | None = None  # streamed increments after which the client goes away
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"input_ids": list(self.input_ids), "sampling_params": self.params, **self.extra}


def workload(
    count: int, seed: int, leave_every: int = 0, max_new: int = 48, spread_s: float = 4.0
) -> list[Job]:
    """Greedy requests of mixed lengths; a third shares long prefixes, every ``leave_every``-th one leaves."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, 500) for _ in range(rng.randrange(40, 90))] for _ in range(4)]
    jobs = []
    for i in range(count):
        prompt = [rng.randrange(2, 500) for _ in range(rng.choice((1, 3, 8, 20, 45, 100)))]
        if rng.random() < 0.35:
            prompt = rng.choice(prefixes) + prompt[:20]
        params = {"temperature": 0, "max_new_tokens": rng.choice((1, 2, 5, 13, max_new, max_new)),
                  "ignore_eos": rng.random() < 0.5}  # fmt: skip
        leaves = leave_every and i % leave_every == leave_every - 1
        jobs.append(
            Job(
                tuple(prompt),
                params,
                arrival_s=rng.random() * spread_s,
                disconnect_after=2 if leaves else None,
            )
        )
    return jobs


def run_jobs(server: Server, jobs: Sequence[Job], speed: float = 1.0) -> list[dict[str, Any] | None]:
    """Answers in the jobs' order; None for those whose client disconnected."""
    return asyncio.run(_run_jobs(server, jobs, speed))


async def _run_jobs(server: Server, jobs: Sequence[Job], speed: float) -> list[dict[str, Any] | None]:
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        return list(await asyncio.gather(*(_run_job(client, job, speed) for job in jobs)))


async def _run_job(client: httpx.AsyncClient, job: Job, speed: float) -> dict[str, Any] | None:
    await asyncio.sleep(job.arrival_s / speed)
    if job.disconnect_after is None:
        response = await client.post("/generate", json=job.body)
        assert response.status_code == 200, response.text
        return dict(response.json())
    async with client.stream("POST", "/generate", json={**job.body, "stream": True}) as stream:
        seen = 0
        async for line in stream.aiter_lines():
            seen += line.startswith("data:")
            if seen >= job.disconnect_after:
                return None
    return None


def outputs(answers: Sequence[dict[str, Any] | None]) -> list[list[int] | None]:
    return [None if a is None else a["output_ids"] for a in answers]


def whole_texts(server: Server, jobs: Sequence[Job]) -> list[list[int]]:
    """What it says to all of them, with nobody leaving and all at once."""
    staying = [replace(job, disconnect_after=None, arrival_s=0.0) for job in jobs]
    return [a["output_ids"] for a in run_jobs(server, staying) if a is not None]

"""Looks at the server from outside while it works: its memory, and whether it still answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import psutil

from adaserve.bench.soak.invariants import MemorySample
from adaserve.bench.soak.tally import Tally
from adaserve.slo.classes import DEFAULT_CLASS

PROBE_S = 3.0
TITLE = "sglang::"
"""How SGLang names its processes."""
TRAINER = "adaserve.trainer.process"


def memory(pid: int) -> MemorySample:
    """Resident memory of the server's processes. Raises psutil.NoSuchProcess when it has ended."""
    server = psutil.Process(pid)
    mib = {"main": server.memory_info().rss / 2**20}
    for child in server.children(recursive=True):
        try:
            title, rss = " ".join(child.cmdline()), child.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
        if title.startswith(TITLE):
            mib[title.removeprefix(TITLE).strip()] = rss
        elif TRAINER in title:
            mib["trainer"] = rss
    return MemorySample(time.time(), mib)


class Prober:
    """Asks the server something every few seconds, on a thread of its own; a context manager."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self._url, self._deadline_s = url, deadline_s
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._tally = Tally()
        self._probing = threading.Lock()
        self._paused = False
        self.longest_s = 0.0
        self.probes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=self._deadline_s)

    def take(self) -> Tally:
        """What was counted since the last call."""
        with self._lock:
            made, self._tally = self._tally, Tally()
        return made

    def pause(self) -> None:
        """Returns when no probe is under way."""
        self._paused = self._probing.acquire(timeout=2 * self._deadline_s)

    def go(self) -> None:
        """After a pause."""
        if self._paused:
            self._paused = False
            self._probing.release()

    def _run(self) -> None:
        asks: list[Callable[[httpx.Client], httpx.Response]] = [
            _token,
            lambda client: client.get("/health"),
            _token,
            lambda client: client.get("/slo/snapshot.json"),
            _token,
            lambda client: client.get("/metrics"),
        ]
        turn = 0
        while not self._end.wait(PROBE_S):
            if self._probing.acquire(blocking=False):
                self._probe(asks[turn % len(asks)])
                self._probing.release()
                turn += 1

    def _probe(self, ask: Callable[[httpx.Client], httpx.Response]) -> None:
        start_s = time.monotonic()
        fault = None
        try:
            # A connection of its own: the kernel hands it to any of the HTTP workers.
            with httpx.Client(base_url=self._url, timeout=self._deadline_s) as client:
                answer = ask(client)
            if answer.status_code != 200:
                fault = f"{answer.request.url.path} answered {answer.status_code}: {answer.text[:300]}"
        except httpx.HTTPError as error:
            fault = f"a probe had no answer after {time.monotonic() - start_s:.1f} s: {error!r}"
        with self._lock:
            if fault is not None:
                self._tally.violate("hang", fault, time.time())
            elif ask is _token:
                self._tally.requests["probe"] += 1
                self._tally.served[DEFAULT_CLASS] += 1
                self._tally.served_tokens[DEFAULT_CLASS] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - start_s)
        self.probes += 1


def _token(client: httpx.Client) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": 1}
    return client.post("/generate", json={"text": "import", "sampling_params": params})

"""The parent's side of the clients: it starts them, pauses them, adds up what they count, and kills some."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from adaserve.bench.soak import killed
from adaserve.bench.soak.calls import LEAVING
from adaserve.bench.soak.clients import Role, client_process
from adaserve.bench.soak.tally import Tally

STREAMS = 6
"""Streams that a client holds when it is killed."""


class ClientProcesses:
    """A context manager that stops them."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._tally = Tally()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._idle = [False] * len(roles)
        for role in roles:
            ours, theirs = context.Pipe()
            process = context.Process(target=client_process, args=(role, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._say("stop")
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def take(self) -> Tally:
        """What the clients have counted since the last call."""
        self._poll()
        made, self._tally = self._tally, Tally()
        return made

    def _poll(self) -> None:
        for number, pipe in enumerate(self._pipes):
            try:
                while pipe.poll():
                    self._idle[number], made = pipe.recv()
                    self._tally.add(made)
            except (EOFError, OSError):
                if not self._idle[number]:
                    self._tally.violate("clients", f"client {number} of the soak itself ended", time.time())
                self._idle[number] = True

    def go(self) -> None:
        self._say("go")

    def pause(self, deadline_s: float) -> bool:
        """Waits until every client has its last answer; whether that took no longer than the deadline."""
        self._say("pause")
        self._idle = [False] * len(self._idle)
        end_s = time.monotonic() + deadline_s
        while not all(self._idle) and time.monotonic() < end_s:
            self._poll()
            time.sleep(0.05)
        return all(self._idle)

    def _say(self, word: str) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(word)
            except OSError:
                continue  # poll() reports a client that ended


class Victim:
    """A client process that is killed while it holds streams."""

    def __init__(self, port: int, tally: Tally) -> None:
        command = [sys.executable, str(Path(killed.__file__)), str(port), str(STREAMS), LEAVING]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._tally = tally
        self.ended = False

    def step(self) -> None:
        """Kills it once it holds its streams."""
        assert self._process.stdout is not None
        if not self.ended and (self._process.stdout.read() or self._process.poll() is not None):
            self.kill()

    def kill(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._tally.requests["client killed"] += STREAMS
        self._tally.ends["client killed"] += STREAMS
        self._tally.streams += STREAMS
        self._tally.maybe[LEAVING] += STREAMS
        self._tally.maybe_tokens[LEAVING] += STREAMS * killed.TOKENS

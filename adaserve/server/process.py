"""A server as a child process, for tools and tests."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from adaserve.host.lifetime import PARENT_ENV
from adaserve.host.ports import why_not_free
from adaserve.host.processes import (
    family,
    left_behind,
    metrics_folders,
    remove,
    remove_folders,
    shared_memory,
    told_counters,
)
from adaserve.host.signals import STACK_DUMP_SIGNAL
from adaserve.redaction import without_secrets
from adaserve.server.control import ServerControl, ServerError

START_TIMEOUT_S = 600.0
STOP_PATIENCE_S = 1.0
"""SGLang's schedulers end at once. Its first process would then sleep for five seconds, and end as well."""
HEALTH_S = 25.0
"""SGLang's `/health` waits for a token, for which it looks once a second, up to 20 times."""
_REFUSED = "Scheduler hit an exception: "  # and a sentence of ours, or a traceback
_BIND_ERROR = "error while attempting to bind on address"  # uvicorn's


def require_free(host: str, port: int) -> None:
    """Raises ServerError where a server cannot listen there: SGLang would find out half a minute later."""
    if (why := why_not_free(host, port)) is not None:
        raise ServerError(why)


class Spec(Protocol):
    """A server that can be started: ours, or a router."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]:
        """What requests to it need, so that they are let in."""
        ...

    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...


class ServerProcess(ServerControl):
    """A server in a process group of its own; stopped, with all its children, on exit.

    ::

        with ServerProcess(ServerSpec(port=free_port()), log=Path("server.log")) as server:
            httpx.post(server.url + "/generate", ...)
    """

    def __init__(
        self,
        spec: Spec,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(spec.url, spec.headers)
        self.spec, self.log = spec, log
        self._env = {**spec.environment(), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0  # epoch
        self._leaves = set[Path](), set[Path]()  # shared memory, and counters, of one that was up

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, waiting: Callable[[float], None] = lambda _: None, limit_s: float = START_TIMEOUT_S
    ) -> None:
        """Returns when the server answers; ``waiting`` gets the seconds so far. Raises ServerError, also
        after ``limit_s``."""
        require_free(self.spec.host, self.spec.port)
        command = self.spec.command()
        self._started_s = time.time()
        self.log.parent.mkdir(parents=True, exist_ok=True)  # a folder for temporary files is cleaned at times
        self.log.open("wb").close()
        with self.log.open("ab", buffering=0) as log:  # appends, so that somebody may cut off what is there
            with suppress(OSError):  # a full disk is no reason not to serve
                log.write(f"$ {shlex.join(without_secrets(command))}\n".encode())
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self._env, PARENT_ENV: str(os.getpid())},
                start_new_session=True,
            )
        try:
            self._await_health(waiting, limit_s)
            self._leaves = self._mapped()  # nobody can say so any more once it is killed
        except BaseException:
            self.stop()
            raise

    def _await_health(self, waiting: Callable[[float], None], limit_s: float) -> None:
        assert self._process is not None
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < limit_s:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server {self.how} while it started:\n{self.why()}\n(full log: {self.log})"
                )
            if _BIND_ERROR in self._logged():
                # SGLang stays up without its HTTP server.
                raise ServerError(
                    f"port {self.spec.port} was taken while the server started: start it again, or choose "
                    f"another with --port (full log: {self.log})"
                )
            waiting(waited_s)
            try:
                if self._ask("GET", "/health", timeout=HEALTH_S).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        self._say_where()
        raise ServerError(f"the server did not answer within {limit_s:.0f} s; see {self.log}")

    @property
    def how(self) -> str:
        """How it ended, where its log cannot know."""
        killed = self._process is not None and self._process.poll() == -signal.SIGKILL
        return "was killed by SIGKILL, as where the host has no memory left" if killed else "ended"

    def why(self) -> str:
        """The lines of the log that best explain what went wrong."""
        lines = self._logged().splitlines()
        errors = [
            line
            for line in lines
            if line.startswith(("ValueError", "RuntimeError", "adaserve.", "adaserve: ", "error: "))
            or "Error: " in line
            or _REFUSED in line
        ]
        return "\n".join(errors[-3:] or lines[-15:]) or "its log is empty, as where the disk is full"

    def _logged(self) -> str:
        """Nothing where somebody has removed the log."""
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def give_up(self) -> None:
        """Stops a server that hangs; its log says where each of its threads was."""
        self._say_where()
        self.stop()

    def _say_where(self) -> None:
        """Before an end only: what is no Python process of SGLang's ends at once."""
        for process in family(self.pid) if self._process is not None else ():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(STACK_DUMP_SIGNAL)
        time.sleep(STOP_PATIENCE_S)

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ends the server and everything that it started. What is left after ``patience_s`` is killed, the
        first process before the others. The shared memory that they leave behind is removed."""
        process = self._process
        if process is None:
            return
        members = family(process.pid)
        leaves = zip(self._leaves, self._mapped(), strict=True)
        shared, folders = (before | now for before, now in leaves)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        psutil.wait_procs(members, timeout=patience_s)
        process.kill()
        alive = psutil.wait_procs(members, timeout=STOP_PATIENCE_S)[1]
        for p in alive:
            p.kill()
        psutil.wait_procs(alive, timeout=5.0)
        process.wait()
        remove(left_behind(shared, self._started_s))
        remove_folders(folders - {told_counters(self._env)})
        self._process, self._leaves = None, (set(), set())

    def _mapped(self) -> tuple[set[Path], set[Path]]:
        """Shared memory, and folders of counters, that its processes use."""
        pids = [self.pid, *(p.pid for p in family(self.pid))]
        return set().union(*map(shared_memory, pids)), set().union(*map(metrics_folders, pids))

    @property
    def code(self) -> int | None:
        """Exit code of its first process; None while that runs, or where there is none."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of a server that was started; its other processes are children."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

"""The server's end of the connection to the trainer: starts it, asks whether it is alive, starts it again.

Nothing here waits. A trainer that ends or is silent for long is replaced, a few times; after that learning
stops and the server goes on with the draft it has.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from mmap import mmap
from pathlib import Path

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from adaserve.config import AdaServeConfig
from adaserve.host.lifetime import PARENT_ENV
from adaserve.trainer.draft import File
from adaserve.trainer.messages import Alive, Candidate, Load, Message, Settings, line, receive, send
from adaserve.trainer.shared_memory import Ring, allocate, memory, shares

logger = logging.getLogger(__name__)

_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""The trainer writes into the server's log."""
_KEEPS = str(1 << 30)
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": _KEEPS, "MALLOC_TRIM_THRESHOLD_": _KEEPS}
"""glibc would give every large tensor back to the kernel and get it cleared again, in thousands of page
faults a second. Many kernels take no core away inside of one: a thread of the server's would wait for it."""
ASK_S = 1.0
SILENT_S = 600.0
"""A trainer that has not answered for so long hangs: on a busy host even a live one takes minutes to load."""
STARVED = 0.1
"""A trainer that gets less than this share of a processor cannot answer in time, and is waited for."""
LAST = 19
"""The lowest priority."""
MAX_STARTS = 4
FIRST_WAIT_S = 5.0
"""Before a trainer is started again; four times as long each time."""


class TrainerLink:
    """One trainer at a time, and the memory shared with it.

    ``folder``: the draft's checkpoint. ``weights_bytes``: room for a candidate. ``vocabulary``: the target's
    tokens; ``known``: ids of those that a draft model knows, None = all. ``target``: the target's checkpoint,
    where the draft is a head.
    """

    def __init__(
        self,
        config: AdaServeConfig,
        folder: str,
        weights_bytes: int,
        vocabulary: int,
        known: NDArray[np.int64] | None = None,
        target: str | None = None,
    ) -> None:
        self._config, self._folder, self._weights_bytes = config, folder, weights_bytes
        self._vocabulary, self._known, self._target = vocabulary, known, target
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_s: float | None = None  # and not yet answered
        self._next_ask_s = 0.0
        self._starts, self._start_s = 0, 0.0
        self.ring: Ring | None = None
        self.weights: mmap | None = None
        self.cpu_s, self._cpu_before_s = 0.0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether no trainer will be started any more."""
        return self._connection is None and self._starts >= MAX_STARTS

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def look(self, busy: bool, now_s: float, served: tuple[Candidate, File] | None) -> list[Message]:
        """What the trainer has said since. ``served``: the draft that a new one starts from, None for the
        checkpoint's."""
        if self._connection is None:
            if self._starts < MAX_STARTS and now_s >= self._start_s:
                self._starts += 1
                try:
                    self._start(served)
                except OSError as error:
                    self._try_again(f"could not be started ({error})", now_s)
            return []
        assert self._process is not None
        try:
            said = self._heard()
            if self._asked_s is None and now_s >= self._next_ask_s:
                send(self._connection, Load(busy))
                self._asked_s, self._next_ask_s = now_s, now_s + ASK_S
        except (EOFError, OSError):
            self._ended("has ended", now_s)
            return []
        except msgspec.DecodeError as error:
            self._ended(f"sent something that cannot be read ({error}) and was stopped", now_s)
            return []
        silent_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        if silent_s > SILENT_S and not starves(self._process.pid, self.cpu_s - self._cpu_before_s, silent_s):
            self._ended("hung and was stopped", now_s)
            return []  # a draft among it would lie in memory that is gone
        return said

    def say(self, message: Message) -> None:
        """Sends a message. A trainer that has ended does not get it; ``look`` will notice."""
        assert self._connection is not None
        try:
            send(self._connection, message)
        except OSError as error:
            logger.warning("AdaServe: the trainer did not receive a reply: %s", error)

    def _heard(self) -> list[Message]:
        assert self._connection is not None
        said: list[Message] = []
        while (message := receive(self._connection)) is not None:
            if isinstance(message, Alive):
                self.cpu_s = self._cpu_before_s + message.cpu_s
                self._asked_s = None
            else:
                said.append(message)
        return said

    def _start(self, served: tuple[Candidate, File] | None) -> None:
        """Raises OSError where the host has no process, memory or descriptor to spare."""
        config = self._config
        with ExitStack() as opened:  # until they are mapped here, and inherited there
            ring = _allocated(shares(config.learn_memory_mb).ring, opened)
            weights = _allocated(self._weights_bytes, opened)
            ours, theirs = map(opened.enter_context, line())
            shared, known = memory(weights), None
            if self._known is not None:  # too many for a command line
                known = _allocated(self._known.nbytes, opened)
                memory(known)[:] = self._known.tobytes()
            if served is not None:
                shared[: len(served[1])] = served[1].data
            settings = Settings(
                self._folder, config.learn_device, config.learn_loss, config.learn_rate,
                config.learn_memory_mb, config.learn_folder, ring, weights, theirs.fileno(),
                self._vocabulary, known, self._target, None if served is None else served[0],
            )  # fmt: skip
            inherited = (ring, weights, theirs.fileno(), *(() if known is None else (known,)))
            process = subprocess.Popen(
                [sys.executable, "-m", "adaserve.trainer.process", msgspec.json.encode(settings).decode()],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    PARENT_ENV: str(os.getpid()),
                    "OMP_NUM_THREADS": "1",
                    **_ALLOCATOR,
                    **_QUIET,
                },
            )
            self.ring, self.weights = Ring(ring), shared
            self._process, self._connection = process, socket.socket(fileno=ours.detach())
        stand_back(process.pid, config.learn_nice)
        self._asked_s, self._next_ask_s = None, 0.0

    def _ended(self, how: str, now_s: float) -> None:
        assert self._connection is not None and self._process is not None
        self._connection.close()
        self._connection = self.ring = self.weights = None
        self._process.kill()  # its zombie is collected when the next one starts
        self._cpu_before_s = self.cpu_s
        self._try_again(how, now_s)

    def _try_again(self, why: str, now_s: float) -> None:
        self._start_s = now_s + FIRST_WAIT_S * 4 ** (self._starts - 1)
        then = (
            "the draft stays as it is"
            if self.is_over
            else f"another one starts in {self._start_s - now_s:.0f} s"
        )
        logger.warning("AdaServe: the trainer %s; %s", why, then)


def _allocated(size: int, opened: ExitStack) -> int:
    """A descriptor of shared memory, which is closed with ``opened``."""
    fd = allocate(size)
    opened.callback(os.close, fd)
    return fd


def stand_back(pid: int, nice: int) -> None:
    """Gives one of our processes the priority ``nice``; at 19 it gets only time that no other process wants.
    If the host runs out of memory, it is the first that the kernel ends.

    A thread that only has low priority may finish its time slice, milliseconds, before a thread of the server
    gets its core back, and a team of threads waits for its last one. Under SCHED_IDLE it gives way at once.
    """
    with suppress(OSError):  # not Linux
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    except OSError as error:  # the server itself has a lower one
        logger.warning("AdaServe: the trainer runs at the priority of the server: %s", error)
    if nice == LAST and hasattr(os, "SCHED_IDLE"):
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:  # a sandbox may forbid it
            logger.warning("AdaServe: the trainer has low priority, but not SCHED_IDLE: %s", error)


def starves(pid: int, cpu_s: float, seconds: float) -> bool:
    """Whether a process that had used ``cpu_s`` of processor time wants a processor, and has had one for
    little of the ``seconds`` since: it is slow because others are busy, and does not hang."""
    process = psutil.Process(pid)
    used = process.cpu_times()
    wants = process.status() == psutil.STATUS_RUNNING
    return wants and used.user + used.system - cpu_s < STARVED * seconds

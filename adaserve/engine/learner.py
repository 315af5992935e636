"""The server's side of a draft that learns: starts the trainer, hands over records, swaps better drafts in.

Nothing here waits for the trainer. When it ends or hangs, the draft stays as it is.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from adaserve.config import AdaServeConfig
from adaserve.engine.host.swap import Weights, exchange, prepared, served
from adaserve.engine.state import RequestState
from adaserve.engine.tap import Tap
from adaserve.learning.draft import checked
from adaserve.learning.messages import (
    Answer,
    Candidate,
    Hello,
    Load,
    Message,
    Progress,
    Settings,
    receive,
    send,
)
from adaserve.learning.shared import Ring, allocate, memory
from adaserve.learning.versions import Versions
from adaserve.lifetime import PARENT_ENV
from adaserve.slo.events import DraftLearning, Judged
from adaserve.slo.stats import SLOStats

logger = logging.getLogger(__name__)

_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""The trainer writes into the server's log."""
LOOK_S = 0.25
MOST_JUDGED = 64
"""Judgements that are remembered for the operator."""
TIGHT = 0.9
"""The trainer waits while a running request has used more than this share of the time that its SLO allows."""


class Learner:
    """Owns the tap, the shared memory and the trainer's process.

    ``model``: the draft as SGLang has loaded it. ``folder``: where its checkpoint is.
    """

    def __init__(self, config: AdaServeConfig, model: Any, folder: str, stats: SLOStats) -> None:
        self._model, self._stats = model, stats
        if config.learn_folder is not None:
            Versions(Path(config.learn_folder)).current(folder)  # while a wrong one can still be said
        ring = allocate(config.learn_memory_mb * 1_000_000 // 4)
        stored = sum(p.numel() * p.element_size() for p in model.parameters())
        weights = allocate(stored + (1 << 20))
        self.tap = Tap(Ring(ring), config.learn_share)
        self._weights = memory(weights)
        ours, theirs = socket.socketpair()
        settings = Settings(
            folder,
            config.learn_loss,
            config.learn_rate,
            config.learn_memory_mb,
            config.learn_folder,
            ring,
            weights,
            theirs.fileno(),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "adaserve.learning.process", msgspec.json.encode(settings).decode()],
            pass_fds=(ring, weights, theirs.fileno()),
            stdin=subprocess.DEVNULL,
            env={**os.environ, PARENT_ENV: str(os.getpid()), "OMP_NUM_THREADS": "1", **_QUIET},
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, config.learn_nice)
        theirs.close()
        for fd in (ring, weights):
            os.close(fd)  # mapped here, inherited there
        self._trainer: Connection | None = Connection(ours.detach())
        self._manifest: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._looked_s = 0.0
        self._busy = False
        self._first = served(model)
        self._learned: Weights | None = None  # while the first draft serves instead
        self._preparing: tuple[Candidate, Future[Weights]] | None = None
        self._helper = ThreadPoolExecutor(1, "adaserve-draft")
        self.state = DraftLearning(trainer="starting")

    def serve(self, name: str) -> None:
        """Serves the "first" draft, for comparison, or the "present" one again, from the next iteration on.
        While the first one serves, nothing is recorded; the trainer goes on with what it has."""
        if name == "first" and self._learned is None:
            self._learned = served(self._model)
            exchange(self._model, self._first)
        elif name == "present" and self._learned is not None:
            exchange(self._model, self._learned)
            self._learned = None
        self.tap.pauses = self._learned is not None

    def look(self, states: Iterable[RequestState], now_s: float) -> None:
        """Between two iterations: tells the trainer whether to wait, and takes in what it has to say."""
        if self._trainer is None or now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        try:
            while self._trainer.poll():
                self._take_in(receive(self._trainer))
            if self._preparing is not None and self._preparing[1].done():
                self._swap(*self._preparing)
            if (busy := is_tight(states, now_s)) != self._busy:
                self._busy = busy
                send(self._trainer, Load(busy))
        except (EOFError, OSError):
            self._ended()
        self._report()

    def _take_in(self, message: Message) -> None:
        state = self.state
        if isinstance(message, Hello):
            self._manifest = message.tensors
            state.trainer = "running"
        elif isinstance(message, Progress):
            judged = Judged(time.time(), message.candidate, message.present, message.first, message.verdict)
            state.judged = [*state.judged[1 - MOST_JUDGED :], judged]
            state.requests, state.tokens = message.requests, message.tokens
            state.updates, state.cpu_s = message.updates, message.cpu_s
            state.rejected += message.verdict == "worse"
            logger.info(
                "AdaServe: on the newest requests the draft in training gets %.3f tokens of 4 accepted, the "
                "present one %.3f, the first one %.3f: %s",
                message.candidate, message.present, message.first, message.verdict,
            )  # fmt: skip
        elif isinstance(message, Candidate):
            self._preparing = message, self._helper.submit(self._prepared, message.size)

    def _prepared(self, size: int) -> Weights:
        """Beside the iterations, since reading and packing take tens of milliseconds."""
        return prepared(self._model, checked(self._weights[:size], self._manifest))

    def _swap(self, candidate: Candidate, ready: Future[Weights]) -> None:
        self._preparing = None
        start_s = time.perf_counter()
        try:
            weights = ready.result()
        except ValueError as error:
            self.state.rejected += 1
            logger.warning("AdaServe: a new draft was dropped, the present one stays: %s", error)
            self._answer(candidate, taken=False)
            return
        if self._learned is None:
            exchange(self._model, weights)
        else:
            self._learned = weights
        self.state.swaps += 1
        self.state.swap_ms = (time.perf_counter() - start_s) * 1e3
        logger.info(
            "AdaServe: draft %s serves, %.3f tokens of 4 accepted instead of %.3f (swapped in %.2f ms)",
            candidate.version, candidate.score, candidate.present, self.state.swap_ms,
        )  # fmt: skip
        self._answer(candidate, taken=True)

    def _answer(self, candidate: Candidate, *, taken: bool) -> None:
        assert self._trainer is not None
        send(self._trainer, Answer(candidate.version, taken))

    def _ended(self) -> None:
        logger.warning("AdaServe: the trainer has ended; the draft stays as it is")
        self.state.trainer = "ended"
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        self._process.poll()

    def _report(self) -> None:
        self.state.recorded, self.state.dropped = self.tap.recorded, self.tap.dropped
        self._stats.learned(self.state)


def is_tight(states: Iterable[RequestState], now_s: float) -> bool:
    """Whether a running request is near the limit of its TPOT SLO, or beyond it."""
    return any(now_s - s.decode_start_s > TIGHT * s.tpot_slo_s * max(1, s.decoded) for s in states)

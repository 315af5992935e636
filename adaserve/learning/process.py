"""The trainer's process: ``python -m adaserve.learning.process SETTINGS``.

It takes in what was served, trains, judges, and offers better drafts. It works with what the server leaves of
the processor: one thread of low priority, which waits whenever the server says that it is busy.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from adaserve.learning.draft import DraftCopy, checked, to_bytes
from adaserve.learning.home import home_records
from adaserve.learning.messages import Answer, Candidate, Hello, Load, Progress, Settings, receive, send
from adaserve.learning.records import Record
from adaserve.learning.shared import Ring, memory
from adaserve.learning.trainer import JUDGED, Judgement, Trainer
from adaserve.learning.versions import Version, Versions
from adaserve.lifetime import die_with_parent

logger = logging.getLogger(__name__)

LOOK_S = 0.2


class Process:
    """Connects a trainer with its server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server = Connection(settings.socket)
        self._ring, self._weights = Ring(settings.ring), memory(settings.weights)
        self._versions = None if settings.folder is None else Versions(Path(settings.folder))
        self._fresh: deque[Record] = deque()
        replay_bytes = settings.memory_mb * 1_000_000 // 2
        self._most_fresh_bytes, self._fresh_bytes = replay_bytes // 2, 0
        self._offered = 0
        self._answers: dict[int, bool] = {}  # by number of the offer
        self._busy = False
        draft = DraftCopy(settings.draft)
        home = home_records(draft, settings.draft)
        self._trainer = Trainer(
            draft, home, loss=settings.loss, rate=settings.rate, replay_bytes=replay_bytes
        )
        send(self._server, Hello(draft.manifest()))

    def run(self) -> None:
        """Until the server is gone. Raises EOFError then."""
        self._bring_back()
        while True:
            self._pause()
            if len(self._fresh) < JUDGED:
                time.sleep(LOOK_S)
                continue
            unseen = [self._fresh.popleft() for _ in range(JUDGED)]
            self._fresh_bytes -= sum(r.nbytes for r in unseen)
            if self._trainer.updates:
                self._judge(unseen)
            self._trainer.learn(unseen, self._pause)

    def _bring_back(self) -> None:
        """Offers the draft of an earlier run."""
        if self._versions is None or (found := self._versions.current(self._settings.draft)) is None:
            return
        version, data = found
        state = checked(data, self._trainer.draft.manifest())
        self._offer(state, Candidate(0, 0, version.score, version.replaced))
        self._trainer.restart()

    def _judge(self, unseen: list[Record]) -> None:
        trainer = self._trainer
        found = trainer.judge(unseen, self._pause)
        counts = (trainer.requests, trainer.tokens, trainer.updates, time.process_time())
        send(self._server, Progress(found.present, found.first, found.candidate, found.verdict, *counts))
        if found.verdict == "worse":
            trainer.restart()
        elif found.verdict == "better":
            state = trainer.draft.state()
            if self._offer(state, Candidate(0, 0, found.candidate, found.present)):
                self._keep(state, found)
            else:
                trainer.restart()

    def _offer(self, state: dict[str, Tensor], candidate: Candidate) -> bool:
        """Whether the server drafts with ``state`` from now on."""
        data = to_bytes(state)
        self._weights[: len(data)] = data
        self._offered += 1
        candidate.version, candidate.size = self._offered, len(data)
        send(self._server, candidate)
        while self._offered not in self._answers:  # the weights must stay until then
            time.sleep(LOOK_S)
            self._pause()
        if taken := self._answers.pop(self._offered):
            self._trainer.present = state
        return taken

    def _keep(self, state: dict[str, Tensor], found: Judgement) -> None:
        if self._versions is None:
            return
        scores = (found.candidate, found.present, found.first)
        version = Version(0, 0.0, *scores, self._trainer.tokens, self._settings.draft)
        try:
            self._versions.add(to_bytes(state), version)
        except OSError as error:  # a full disk must not end the learning
            logger.warning("AdaServe: a draft could not be kept: %s", error)

    def _pause(self) -> None:
        """Takes in records and messages; waits while the server is busy. Raises EOFError at its end."""
        self._listen()
        while self._busy:
            time.sleep(LOOK_S)
            self._listen()

    def _listen(self) -> None:
        while (data := self._ring.read()) is not None:
            record = Record.from_bytes(data)
            self._fresh.append(record)
            self._fresh_bytes += record.nbytes
            while self._fresh_bytes > self._most_fresh_bytes:
                self._fresh_bytes -= self._fresh.popleft().nbytes
        while self._server.poll():
            message = receive(self._server)
            if isinstance(message, Load):
                self._busy = message.busy
            elif isinstance(message, Answer):
                self._answers[message.version] = message.taken


def main() -> None:
    """Runs until the server ends."""
    die_with_parent()
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    try:
        Process(settings).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server has ended


if __name__ == "__main__":
    main()

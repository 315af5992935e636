"""The trainer's process: ``python -m adaserve.trainer.process SETTINGS``.

It reads what was served, trains, judges, and offers better drafts. It uses spare processor time only: one
thread of low priority, which waits whenever the server says that it is busy.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from adaserve.host.lifetime import die_with_parent
from adaserve.sharpening import load_sharpening
from adaserve.trainer.draft import DraftCopy, checked, to_bytes
from adaserve.trainer.draft_head import HeadCopy
from adaserve.trainer.judging import Judgement, Snapshot
from adaserve.trainer.messages import (
    Alive,
    Answer,
    Candidate,
    Hello,
    Load,
    Progress,
    Settings,
    receive,
    send,
)
from adaserve.trainer.records import Newest, Record
from adaserve.trainer.rehearsal import rehearsal_records
from adaserve.trainer.shared_memory import Ring, memory, shares
from adaserve.trainer.trainer import JUDGED, Recipe, Trainer
from adaserve.trainer.versions import Version, Versions, fingerprint_of

logger = logging.getLogger(__name__)

LOOK_S = 0.2
BUSY_S = 2.0
"""A server that has said that it is busy says so again within this time, or has nothing to do any more."""
SPARE = 0.5
"""A piece of work that got less of a processor than this found the host busy."""
REST, MAX_REST_S = 3.0, 30.0
"""On a busy host the trainer waits so many times as long as a piece of work took, at most the second."""


def rest_s(worked_s: float, used_s: float) -> float:
    """How long to wait behind a piece of work that took ``worked_s``, ``used_s`` of them on a processor.

    Even a thread that gives way at once costs those that it gives way to something, since its data took the
    place of theirs in the caches. So on a host without spare capacity it must hardly ever run.
    """
    return min(REST * worked_s, MAX_REST_S) if used_s < SPARE * worked_s else 0.0


class Process:
    """Connects a trainer with its server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server = socket.socket(fileno=settings.socket)
        self._ring, self._weights = Ring(settings.ring), memory(settings.weights)
        self._versions = None if settings.folder is None else Versions(Path(settings.folder))
        room = shares(settings.memory_mb)
        self._fresh = Newest(room.fresh)  # not trained on yet
        self._no_room = False  # whether records had to be left out since the last round
        self._offered = 0
        self._answers: dict[int, bool] = {}  # by number of the offer
        self._busy_until_s = 0.0
        self._resume()
        draft: DraftCopy | HeadCopy
        if settings.target is None:
            known = None if settings.known is None else np.frombuffer(memory(settings.known), np.int64).copy()
            draft = DraftCopy(settings.draft, settings.device, settings.vocabulary, known)
        else:
            draft = HeadCopy(settings.draft, settings.target, settings.device)
        self._began_as = "" if self._versions is None else fingerprint_of(settings.draft)
        self._trainer = Trainer(
            draft,
            [],
            Recipe(settings.loss, settings.rate),
            sharpening=load_sharpening(Path(settings.draft)),
            replay_bytes=room.replay,
        )
        send(self._server, Hello(draft.manifest()))

    def run(self) -> None:
        """Until the server is gone. Raises EOFError then."""
        self._bring_back()  # first, since rehearsal texts may take minutes
        draft = self._trainer.draft
        if isinstance(draft, DraftCopy):  # still the first; nobody has hidden states of rehearsal texts
            self._resume()
            self._trainer.rehearsal = rehearsal_records(draft, self._settings.draft, self._pause)
        self._trainer.restart()
        while True:
            self._pause()
            if not self._has_enough:
                time.sleep(LOOK_S)
                self._resume()
                continue
            unseen = [self._fresh.take() for _ in range(min(JUDGED, len(self._fresh)))]
            self._no_room = False
            self._trainer.round(unseen, self._judged, self._pause)

    @property
    def _has_enough(self) -> bool:
        """For a round: ``JUDGED`` requests, or as many as there is room for where they are large."""
        return len(self._fresh) >= JUDGED or (self._no_room and bool(self._fresh))

    def _bring_back(self) -> None:
        """Goes on from the draft that is served, or offers the one of an earlier run."""
        if (now := self._settings.served) is not None:
            state = checked(self._weights[: now.size], self._trainer.draft.manifest())
            self._trainer.present = Snapshot(state, now.correction)
        elif (found := self._kept()) is not None:
            draft, version = found
            if self._offer(draft, version.score, version.replaced):
                self._trainer.present = draft

    def _kept(self) -> tuple[Snapshot, Version] | None:
        """The draft that an earlier run has kept; None where there is none, or none that can be read."""
        try:
            if self._versions is None or (found := self._versions.current(self._settings.draft)) is None:
                return None
            version, data = found
            return Snapshot(checked(data, self._trainer.draft.manifest()), version.correction), version
        except (ValueError, OSError) as error:
            logger.warning(
                "AdaServe: the stored draft is not used, and learning starts from the original one: %s", error
            )
            return None

    def _judged(self, found: Judgement) -> bool:
        """Tells the server. Whether the candidate serves from now on."""
        trainer = self._trainer
        present, first, candidate = (float(s.mean()) for s in (found.present, found.first, found.candidate))
        counts = (trainer.requests, trainer.tokens, trainer.updates)
        send(self._server, Progress(present, first, candidate, found.verdict, found.by_class(), *counts))
        taken = found.wins and self._offer(found.draft, candidate, present)
        if taken:
            self._keep(found.draft, present, first, candidate)
        return taken

    def _offer(self, draft: Snapshot, score: float, present: float) -> bool:
        """Whether the server drafts with ``draft`` from now on."""
        data = to_bytes(draft.state)
        self._weights[: len(data)] = data
        self._offered += 1
        send(self._server, Candidate(self._offered, len(data), score, present, draft.correction))
        while self._offered not in self._answers:  # the weights must stay until then
            time.sleep(LOOK_S)
            self._listen()
        self._resume()
        return self._answers.pop(self._offered)

    def _keep(self, draft: Snapshot, present: float, first: float, candidate: float) -> None:
        if self._versions is None:
            return
        version = Version(
            number=0,
            at=0.0,
            score=candidate,
            replaced=present,
            first=first,
            tokens=self._trainer.tokens,
            draft=self._settings.draft,
            correction=draft.correction,
            began_as=self._began_as,
        )
        try:
            self._versions.add(to_bytes(draft.state), version)
        except OSError as error:  # a full disk must not end the learning
            logger.warning("AdaServe: a draft could not be kept: %s", error)

    def _pause(self) -> None:
        """Reads records and messages; waits while server or host are busy. Raises EOFError when the server
        ends."""
        now_s = time.monotonic()
        until_s = now_s + rest_s(now_s - self._resumed_s, time.process_time() - self._used_s)
        self._listen()
        while time.monotonic() < max(until_s, self._busy_until_s):
            time.sleep(LOOK_S)
            self._listen()
        self._resume()

    def _resume(self) -> None:
        """A piece of work begins."""
        self._resumed_s, self._used_s = time.monotonic(), time.process_time()

    def _listen(self) -> None:
        while (data := self._ring.read()) is not None:
            if not self._fresh.add(Record.from_bytes(data)):
                self._no_room = True
        while (message := receive(self._server)) is not None:
            if isinstance(message, Load):
                self._busy_until_s = time.monotonic() + BUSY_S if message.busy else 0.0
                send(self._server, Alive(time.process_time()))
            elif isinstance(message, Answer):
                self._answers[message.number] = message.taken


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

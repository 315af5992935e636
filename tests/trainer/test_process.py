"""The trainer as its server sees it: over the socket and the shared memory, with the real training."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.sharpening import Correction
from adaserve.trainer.draft import DraftCopy, checked, to_bytes
from adaserve.trainer.messages import (
    Alive,
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
from adaserve.trainer.messages import (
    line as ends,
)
from adaserve.trainer.process import MAX_REST_S, Process, rest_s
from adaserve.trainer.records import Record
from adaserve.trainer.shared_memory import Ring, allocate, memory
from adaserve.trainer.trainer import JUDGED
from adaserve.trainer.versions import Version, Versions, fingerprint_of
from tests.engine.pairs import VOCAB
from tests.trainer.factories import save_drafts, served

WEIGHTS_BYTES = 1 << 24
PATIENCE_S = 600.0
"""On a busy host the trainer rests three times as long as it works."""


class Line:
    """The server's end. The trainer runs on a thread until the line is closed."""

    def __init__(
        self, draft: Path, *, rate: float = 1e-3, folder: Path | None = None, memory_mb: int = 64
    ) -> None:
        self._fds = (allocate(1 << 24), allocate(WEIGHTS_BYTES))
        self.ring, self.weights = Ring(self._fds[0]), memory(self._fds[1])
        self.connection, theirs = ends()
        self._settings = Settings(
            str(draft),
            "cpu",
            "jsd",
            rate,
            memory_mb,
            None if folder is None else str(folder),
            *self._fds,
            theirs.detach(),
            VOCAB,
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with pytest.raises((EOFError, OSError)):
            Process(self._settings).run()

    def start(self, now: Candidate | None = None) -> None:
        self._settings.served = now
        self._thread.start()

    def next(self, kind: type[Message]) -> Message:
        """The next message, which must be of a ``kind``."""
        assert self.has_message(PATIENCE_S), f"no {kind.__name__}"
        message = receive(self.connection)
        assert isinstance(message, kind), message
        return message

    def has_message(self, seconds: float) -> bool:
        """Waits for one."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def close(self) -> None:
        self.connection.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("draft")
    return save_drafts(folder), folder


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    made: list[Line] = []
    yield made
    for line in made:
        line.close()


def feed(line: Line, target: torch.nn.Module, requests: int, seed: int) -> None:
    for record in served(target, requests, seed=seed):
        assert line.ring.write(record.to_bytes())


def test_a_better_draft_is_offered_and_kept(
    target: tuple[torch.nn.Module, Path], lines: list[Line], tmp_path: Path
) -> None:
    lines.append(line := Line(target[1], folder=tmp_path))
    line.start()
    hello = line.next(Hello)
    assert isinstance(hello, Hello)
    feed(line, target[0], 2 * JUDGED, seed=1)
    progress, candidate = line.next(Progress), line.next(Candidate)
    assert isinstance(progress, Progress) and isinstance(candidate, Candidate)
    assert progress.verdict == "better" and progress.candidate > progress.present == progress.first
    assert {name: score.requests for name, score in progress.classes.items()} == {"": JUDGED}
    state = checked(bytes(line.weights[: candidate.size]), hello.tensors)
    first = DraftCopy(str(target[1])).state()
    assert any(not torch.equal(state[name], first[name]) for name in state)
    send(line.connection, Answer(candidate.number, taken=True))
    feed(line, target[0], 2 * JUDGED, seed=2)
    later = line.next(Progress)
    assert isinstance(later, Progress) and later.present > later.first, "the candidate serves now"
    (version,) = Versions(tmp_path).history()
    assert version.score == pytest.approx(progress.candidate) and version.correction == candidate.correction
    assert version.began_as == fingerprint_of(str(target[1])) != ""


def test_a_wrong_learning_rate_never_reaches_serving(
    target: tuple[torch.nn.Module, Path], lines: list[Line]
) -> None:
    lines.append(line := Line(target[1], rate=1.0))
    line.start()
    line.next(Hello)
    for seed in (1, 2, 3):
        feed(line, target[0], 2 * JUDGED, seed=seed)
        progress = line.next(Progress)  # and no candidate
        assert isinstance(progress, Progress) and progress.verdict == "worse"


def test_it_waits_while_the_server_is_busy_and_forgets_that_when_nobody_says_so(
    target: tuple[torch.nn.Module, Path], lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.append(line := Line(target[1], rate=1.0))  # so wrong that there is never a candidate
    line.start()
    line.next(Hello)
    start_s = time.monotonic()
    feed(line, target[0], 2 * JUDGED, seed=1)
    line.next(Progress)
    usual_s = time.monotonic() - start_s
    monkeypatch.setattr("adaserve.trainer.process.BUSY_S", 1e9)
    send(line.connection, Load(busy=True))
    assert isinstance(line.next(Alive), Alive)
    feed(line, target[0], 2 * JUDGED, seed=2)
    assert not line.has_message(2 * usual_s), "it works while the server is busy"
    monkeypatch.setattr("adaserve.trainer.process.BUSY_S", 0.1)
    send(line.connection, Load(busy=True))
    line.next(Alive)
    line.next(Progress)


def test_it_answers_while_it_reads_home_texts(
    target: tuple[torch.nn.Module, Path], lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large draft takes minutes for them: it must not look hung, nor take a processor that is needed."""
    texts = [np.arange(2, 42, dtype=np.int32) for _ in range(12)]
    monkeypatch.setattr("adaserve.trainer.rehearsal._tokenized", lambda _: texts)
    lines.append(line := Line(target[1]))
    send(line.connection, Load(busy=False))
    line.start()
    line.next(Hello)
    line.next(Alive)


def test_after_a_restart_it_goes_on_from_the_draft_that_is_served(
    target: tuple[torch.nn.Module, Path], lines: list[Line]
) -> None:
    """Its present draft is the target itself, so no candidate can be better."""
    lines.append(line := Line(target[1]))
    draft = DraftCopy(str(target[1]))
    best = {name: target[0].state_dict()[name].to(draft.dtypes[name]) for name in draft.state()}
    file = to_bytes(best)
    line.weights[: len(file)] = file
    line.start(Candidate(5, len(file), 4.0, 1.0, Correction(noise=1.2)))
    line.next(Hello)
    feed(line, target[0], 2 * JUDGED, seed=1)
    progress = line.next(Progress)
    assert isinstance(progress, Progress) and progress.present > 1.5 * progress.first


def test_a_kept_draft_serves_before_home_texts_are_read(
    target: tuple[torch.nn.Module, Path], lines: list[Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them takes minutes on a busy host. What they say is the first draft's word all the same."""
    answered, read = threading.Event(), []

    def reading(draft: DraftCopy, *_: Any) -> list[Record]:
        read.append((answered.is_set(), draft.state()))
        return []

    monkeypatch.setattr("adaserve.trainer.process.rehearsal_records", reading)
    first = DraftCopy(str(target[1])).state()
    kept = {name: tensor + 1 for name, tensor in first.items()}
    Versions(tmp_path).add(to_bytes(kept), Version(0, 0.0, 1.5, 1.4, 1.3, 5000, str(target[1])))
    lines.append(line := Line(target[1], folder=tmp_path))
    line.start()
    line.next(Hello)
    candidate = line.next(Candidate)
    assert isinstance(candidate, Candidate)
    answered.set()
    send(line.connection, Answer(candidate.number, taken=True))
    feed(line, target[0], 2 * JUDGED, seed=1)
    line.next(Progress)
    ((after_answer, state),) = read
    assert after_answer and all(torch.equal(state[name], first[name]) for name in first)


def test_a_kept_draft_that_is_damaged_is_not_the_end_of_learning(
    target: tuple[torch.nn.Module, Path], lines: list[Line], tmp_path: Path
) -> None:
    """A machine that lost its power, a full disk, a copy that broke off."""
    Versions(tmp_path).add(b"half a file", Version(0, 0.0, 1.5, 1.4, 1.3, 5000, str(target[1])))
    lines.append(line := Line(target[1], folder=tmp_path))
    line.start()
    line.next(Hello)  # and no candidate
    feed(line, target[0], 2 * JUDGED, seed=1)
    assert isinstance(line.next(Progress), Progress)


def test_large_records_are_learned_from_by_as_many_as_there_is_room_for(
    target: tuple[torch.nn.Module, Path], lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = served(target[0], 4 * JUDGED, seed=1)
    lines.append(line := Line(target[1], memory_mb=1))
    assert JUDGED * records[0].nbytes > 250_000, "they do not all fit"
    line.start()
    line.next(Hello)
    for record in records:  # more than one round, however fast they are taken in
        if line.has_message(0.05):
            break
        assert line.ring.write(record.to_bytes())
    progress = line.next(Progress)
    assert isinstance(progress, Progress) and 1 < progress.requests < JUDGED


def test_a_trainer_that_gets_little_of_a_processor_rests() -> None:
    """What it takes from a host without spare capacity falls to a fraction."""
    assert rest_s(0.2, used_s=0.19) == 0.0
    worked_s, used_s = 2.0, 0.2
    assert used_s / (worked_s + rest_s(worked_s, used_s)) < 0.3 * used_s / worked_s
    assert rest_s(3600.0, used_s=1.0) == MAX_REST_S, "it must not look hung"

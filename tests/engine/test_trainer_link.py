"""The line to the trainer: one that dies or hangs is replaced a few times, and then no more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine import trainer_link
from adaserve.engine.trainer_link import MOST_STARTS, SILENT_S, TrainerLink
from adaserve.learning.messages import Candidate
from adaserve.pair.acceptance import Correction


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerLink]:
    monkeypatch.setattr(trainer_link, "FIRST_WAIT_S", 0.0)
    made = TrainerLink(AdaServeConfig(learn=True, learn_memory_mb=16), str(tmp_path), 1 << 20)
    yield made
    if made.pid is not None:
        os.kill(made.pid, signal.SIGKILL)


def test_a_trainer_that_died_starts_again_from_the_draft_that_serves(link: TrainerLink) -> None:
    link.look(False, 0.0, None)
    first, ring = link.pid, link.ring
    assert first is not None and ring is not None
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 60
    while link.ring is not None:
        assert time.monotonic() < end, "nobody noticed"
        link.look(False, 0.0, None)
    link.look(False, 0.0, (Candidate(1, 7, 1.5, 1.4, Correction()), b"weights"))
    assert link.pid != first and link.ring is not ring
    assert link.weights is not None and link.weights[:7] == b"weights"


def test_one_that_hangs_is_stopped_and_there_is_an_end_to_it(link: TrainerLink) -> None:
    now_s = 0.0
    for _ in range(MOST_STARTS):
        assert not link.is_over
        link.look(False, now_s, None)
        assert link.pid is not None
        os.kill(link.pid, signal.SIGSTOP)
        link.look(False, now_s, None)  # asks
        link.look(False, now_s + SILENT_S, None)
        assert link.ring is not None, "a slow one is waited for"
        now_s += SILENT_S + 1
        link.look(False, now_s, None)
        assert link.ring is None
    assert link.is_over and link.look(False, now_s + 1e6, None) == []

"""The line to the trainer: one that dies or hangs is replaced a few times, and then no more."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine.learning import trainer_link
from adaserve.engine.learning.trainer_link import (
    MAX_STARTS,
    SILENT_S,
    TrainerLink,
    stand_back,
    starves,
)
from adaserve.sharpening import Correction
from adaserve.trainer.messages import Candidate, Hello, Progress, line, send


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerLink]:
    monkeypatch.setattr(trainer_link, "FIRST_WAIT_S", 0.0)
    made = TrainerLink(AdaServeConfig(learn=True, learn_memory_mb=16), str(tmp_path), 1 << 20, 16)
    yield made
    if made.pid is not None:
        os.kill(made.pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Returns when the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_a_trainer_that_died_starts_again_from_the_draft_that_serves(link: TrainerLink) -> None:
    link.look(False, 0.0, None)
    first, ring = link.pid, link.ring
    assert first is not None and ring is not None
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 60
    while link.ring is not None:
        assert time.monotonic() < end, "nobody noticed"
        link.look(False, 0.0, None)
    link.look(False, 0.0, (Candidate(1, 7, 1.5, 1.4, Correction()), np.frombuffer(b"weights", np.uint8)))
    assert link.pid != first and link.ring is not ring
    assert link.weights is not None and link.weights[:7] == b"weights"


def test_one_that_hangs_is_stopped_and_there_is_an_end_to_it(link: TrainerLink) -> None:
    now_s = 0.0
    for _ in range(MAX_STARTS):
        assert not link.is_over
        link.look(False, now_s, None)
        assert link.pid is not None
        stop(link.pid)
        link.look(False, now_s, None)  # asks
        link.look(False, now_s + SILENT_S, None)
        assert link.ring is not None, "a slow one is waited for"
        now_s += SILENT_S + 1
        link.look(False, now_s, None)
        assert link.ring is None
    assert link.is_over and link.look(False, now_s + 1e6, None) == []


def test_what_a_hanging_one_said_last_is_dropped(link: TrainerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is gone: a draft cannot be read any more, and the learner would fail in SGLang's loop."""
    link.look(False, 0.0, None)
    ours, theirs = line()
    monkeypatch.setattr(link, "_connection", ours)
    assert link.pid is not None
    stop(link.pid)
    link.look(False, 0.0, None)  # asks
    send(theirs, Candidate(1, 7, 1.5, 1.4, Correction()))
    assert link.look(False, SILENT_S + 1, None) == [] and link.weights is None


def test_one_that_says_nonsense_is_replaced(
    link: TrainerLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has no word for what is not a number: a mean of nothing reads null, where a number belongs."""
    ours, theirs = line()
    link.look(False, 0.0, None)
    assert link.pid is not None
    monkeypatch.setattr(link, "_connection", ours)
    send(theirs, Progress(1.0, 1.0, math.nan, "worse", {}, 32, 512, 4))
    assert link.look(False, 0.0, None) == [] and link.ring is None and not link.is_over
    assert "cannot be read" in caplog.text


def test_the_rest_of_a_message_is_not_waited_for(link: TrainerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may be stopped at any place, and those of large models have a lot to say first."""
    ours, theirs = line()
    link.look(False, 0.0, None)
    monkeypatch.setattr(link, "_connection", ours)
    hello = Hello({f"model.layers.{i}.mlp.gate_proj.weight": ("bfloat16", (8192, 2048)) for i in range(999)})
    send(theirs, hello)
    assert link.look(False, 0.0, None) == [hello]
    os.write(theirs.fileno(), b"\0\0\x40\0")  # as a length of what follows
    assert link.look(False, 0.0, None) == [] and link.ring is None


def test_a_host_that_cannot_start_one_goes_on_serving(
    link: TrainerLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no process left")

    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", none_left)
        assert link.look(False, 0.0, None) == []
    assert len(os.listdir("/proc/self/fd")) <= opened, "each try would cost descriptors"
    assert "could not be started" in caplog.text and link.ring is None and link.pid is None
    link.look(False, 0.0, None)
    assert link.ring is not None, "the next one is started"


def test_one_that_is_never_started_is_given_up(link: TrainerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(trainer_link, "allocate", none_left)
    for _ in range(MAX_STARTS):
        assert not link.is_over
        link.look(False, 0.0, None)
    assert link.is_over and link.look(False, 1e6, None) == []


def test_a_trainer_gets_what_nobody_else_wants(link: TrainerLink, caplog: pytest.LogCaptureFixture) -> None:
    link.look(False, 0.0, None)
    assert link.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, link.pid) == 19
    forbidden = "not SCHED_IDLE" in caplog.text  # as in some containers
    assert forbidden or os.sched_getscheduler(link.pid) == os.SCHED_IDLE
    oom = Path(f"/proc/{link.pid}/oom_score_adj").read_text()
    assert int(oom) == 1000, "a host without memory would end the server"


def test_one_that_gets_no_processor_does_not_hang() -> None:
    working = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while not starves(working.pid, 0.0, 1e9):
            assert working.poll() is None
            time.sleep(0.01)  # it has to begin
        assert not starves(working.pid, -1.0, 1.0), "it had a processor all the time"
        stop(working.pid)
        assert not starves(working.pid, 0.0, 1e9)
    finally:
        working.kill()
        working.wait()


def test_a_sandbox_or_the_kernel_may_forbid_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody but root gives a process a higher priority than the server itself has."""

    def forbidden(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stand_back(waiting.pid, 19)
        assert os.getpriority(os.PRIO_PROCESS, waiting.pid) == 19
        assert "not SCHED_IDLE: not here" in caplog.text
        monkeypatch.setattr(os, "setpriority", forbidden)
        stand_back(waiting.pid, 5)
        assert "the priority of the server: not here" in caplog.text
    finally:
        waiting.kill()
        waiting.communicate()

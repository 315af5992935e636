"""Open-loop dispatch: every request leaves at its own absolute time, in its own greenlet."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
from collections.abc import Callable, Sequence
from time import perf_counter

import gevent
from gevent.event import Event
from gevent.pool import Group

from adaserve.loadgen.recorder import LogHistogram
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.loadgen.stream import Target, never_sent, send
from adaserve.slo.run_summary import RequestRecord

CONNECT_S = 0.0873
"""A connection is opened this long before its request is due. At the round rates that people ask for, no
other request is sent at that moment.
"""
BEAT_S = 0.02


class Dispatcher:
    """Sends a list of planned requests.

    ``on_record`` is called once per request, in the greenlet of its conversation, when it has ended or
    cannot be sent any more.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[PlannedRequest],
        on_record: Callable[[RequestRecord], None],
        worker: int = 0,
    ) -> None:
        self._target = target
        self._sessions = _by_session(requests)
        self._on_record = on_record
        self._worker = worker
        self._running = Group()
        self._stopped = Event()
        self._t0 = 0.0
        self.read_lag = LogHistogram()

    def run(self, t0: float) -> None:
        """Blocks until everything was sent and answered, or :meth:`stop` was called.

        ``t0``: the value of ``perf_counter()`` that is time 0 of the schedule."""
        self._t0 = t0
        # A full garbage collection stops all streams for tens of ms; the schedule never becomes garbage.
        gc.collect()
        gc.freeze()
        make_room_for_sockets()
        watch = gevent.spawn(self._watch)
        for turns in self._sessions:
            if not self._wait_until(turns[0].at_s - CONNECT_S):
                break
            self._running.spawn(self._session, turns)
        self._running.join()
        watch.kill()

    def stop(self) -> None:
        """Ends the run: nothing more is sent, open streams are closed and recorded as interrupted."""
        self._stopped.set()
        self._running.kill()

    def _now(self) -> float:
        """Seconds since the start of the run."""
        return perf_counter() - self._t0

    def _wait_until(self, at_s: float) -> bool:
        """Sleeps until a time of the run; False when the run was stopped. Times are absolute: if it slept for
        the gaps, the delays of all wake-ups would add up.
        """
        while (left := at_s - self._now()) > 0:
            if self._stopped.wait(left):
                return False
        return not self._stopped.is_set()

    def _watch(self) -> None:
        """How late this process is to do what is due, and so to read: it takes what is ready in turns. Every
        beat counts, those that it was too late for as well."""
        due_s = 0.0
        while True:
            due_s += BEAT_S
            if (left := due_s - self._now()) > 0:
                gevent.sleep(left)
            self.read_lag.add(max(0.0, self._now() - due_s) * 1e3)

    def _session(self, turns: Sequence[PlannedRequest]) -> None:
        history = ""
        ready_s = turns[0].at_s
        for k, request in enumerate(turns):
            due_s = max(request.at_s, ready_s)
            if request.turn and not self._wait_until(due_s - CONNECT_S):
                return
            answer = send(self._target, request, history, due_s, self._now, self._wait_until)
            if answer is None:
                return
            self._report(answer.record)
            if not answer.record.ok:
                # Whoever was turned away does not get the rest of the conversation either. A client that
                # hung up does not want it.
                for lost in turns[k + 1 :] if answer.record.judged else ():
                    self._report(never_sent(lost, max(lost.at_s, self._now())))
                return
            history += f"{request.prompt}{answer.text}\n\n"
            ready_s = self._now() + request.think_s

    def _report(self, record: RequestRecord) -> None:
        record.worker = self._worker
        self._on_record(record)


def make_room_for_sockets() -> None:
    """Makes the kernel enlarge the process's table of open files now.

    It doubles when it is full, and a process with several threads then stands still for a grace
    period of RCU: 5 to 20 ms in the middle of the run, seen by all streams as a late token."""
    most, (soft, _) = 8192, resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = most - 1 if soft == resource.RLIM_INFINITY else min(most, soft) - 1
    with open(os.devnull, "rb") as file, contextlib.suppress(OSError):
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD, highest))


def _by_session(requests: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """Groups turns, in the order of the first turn's time; requests without session stand alone."""
    sessions: dict[str, list[PlannedRequest]] = {}
    for r in requests:
        sessions.setdefault(r.conversation, []).append(r)
    return sorted(sessions.values(), key=lambda turns: turns[0].at_s)

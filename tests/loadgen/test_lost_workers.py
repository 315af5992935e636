"""Workers that end before their master does: between two runs, as a web UI starts them, or in one."""

from __future__ import annotations

import subprocess
import sys

MASTER = """
from types import SimpleNamespace as Record
from locust.runners import STATE_INIT, STATE_MISSING, MasterRunner
from adaserve.loadgen import locust_run

class Run(locust_run.MasterRun):
    def __init__(self, *workers):
        runner = MasterRunner.__new__(MasterRunner)
        runner.clients = Record(all=workers)
        super().__init__(Record(runner=runner), None, None)
        runner.send_message = self.sent

    def _prepare(self):
        return Record(shard=lambda index, count: f"part {index + 1} of {count}")

    def _send_shard(self, client, index, shard):
        print(client, "gets", shard)
        if client != "lost":
            self.on_ready(client)

    def sent(self, message, data, client):
        self.on_done(client, [], stopped=client == "ended")

locust_run._WORKER_WAIT_S = 0.1
lost, first, second = Record(id="lost", state=STATE_MISSING), Record(id="first", state=STATE_INIT), \\
    Record(id="second", state=STATE_INIT)
run = Run(lost, first, second)
run.start()
print(run.reasons)
run = Run(first, Record(id="ended", state=STATE_INIT))
run.start()
print(run.reasons)
"""
WORKER = """
import gevent, time
from dataclasses import asdict
from types import SimpleNamespace as Record
from locust.runners import WorkerRunner
from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.locust_run import WorkerRun
from adaserve.loadgen.schedule import PlannedRequest

runner = WorkerRunner.__new__(WorkerRunner)
runner.send_message = lambda message, data: print(message, data.get("stopped"))
for planned in ([], [PlannedRequest(0, 60.0, "chat", None, None, "hi", 1, 1)]):
    run = WorkerRun(Record(runner=runner), Endpoint(), 0, len(planned))
    run.add([asdict(r) for r in planned])
    going = gevent.spawn_later(0, run.go, time.time())
    gevent.sleep(0.2)
    run.stop()
    going.join()
"""


def said(script: str) -> list[str]:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_worker_that_is_gone_gets_no_part_of_the_next_run() -> None:
    """Nobody would send it, and the run would wait for it for a minute and then give up."""
    assert said(MASTER)[:3] == ["first gets part 1 of 2", "second gets part 2 of 2", "[]"]


def test_a_run_whose_worker_was_ended_by_its_user_is_not_valid() -> None:
    """Ctrl-C: it says that it is done like any other, and has not sent its part."""
    assert said(MASTER)[-1] == "['a worker was lost: its requests are missing']"
    done = [line for line in said(WORKER) if line.startswith("adaserve_done")]
    assert done == ["adaserve_done False", "adaserve_done True"]

"""Workers that end between two runs of one master, as a web UI starts them."""

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
        self.on_done(client, [])

locust_run._WORKER_WAIT_S = 0.1
lost, first, second = Record(id="lost", state=STATE_MISSING), Record(id="first", state=STATE_INIT), \\
    Record(id="second", state=STATE_INIT)
Run(lost, first, second).start()
"""


def test_a_worker_that_is_gone_gets_no_part_of_the_next_run() -> None:
    """Nobody would send it, and the run would wait for it for a minute and then give up."""
    done = subprocess.run([sys.executable, "-c", MASTER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "first gets part 1 of 2\nsecond gets part 2 of 2\n"), done

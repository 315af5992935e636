"""What a killed command started does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from adaserve.host.lifetime import PARENT_ENV

CHILD = (
    "import time; from adaserve.host.lifetime import die_with_parent; die_with_parent(); "
    "print(flush=True); time.sleep(60)"
)
PARENT = textwrap.dedent(
    """
    import os, subprocess, sys, time
    env = {**os.environ, sys.argv[1]: sys.argv[2].format(pid=os.getpid())}
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3]], env=env, stdout=subprocess.PIPE, text=True,
                             start_new_session=True)
    child.stdout.readline()
    print(child.pid, flush=True)
    time.sleep(60)
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
@pytest.mark.parametrize("started_by", ["{pid}", "1"])
def test_a_server_ends_with_the_command_that_started_it(started_by: str) -> None:
    command = [sys.executable, "-c", PARENT, PARENT_ENV, started_by, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    ended = not psutil.wait_procs([child], timeout=10.0 if started_by == "{pid}" else 1.0)[1]
    if not ended:
        child.kill()
    assert ended == (started_by == "{pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
@pytest.mark.parametrize("waited_for", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import adaserve.host.lifetime as l; l.die_with_parent(); print('up', flush=True)"),
        ("-m", "adaserve.cli", "serve", "--model-path", "/nowhere"),
    ],
)
def test_a_server_does_not_outlive_a_command_that_ended_before_it_was_heeded(
    command: tuple[str, ...], waited_for: bool
) -> None:
    """As a replica's command does that still looks for its model, or prepares it."""
    parent = subprocess.Popen([sys.executable, "-c", ""])
    if waited_for:
        parent.wait()
    else:  # a zombie, until this process asks for it
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    env = {**os.environ, PARENT_ENV: str(parent.pid)}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, timeout=60, check=False)
    parent.wait()
    assert done.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM) and not done.stdout, done


ORPHAN = """
import multiprocessing, os, signal, time
from adaserve.host.lifetime import die_with_parent
def serve(parent):
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent()
    print("up", flush=True)
multiprocessing.get_context("fork").Process(target=serve, args=(os.getpid(),)).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_process_of_a_server_that_was_killed_meanwhile_does_not_start() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")

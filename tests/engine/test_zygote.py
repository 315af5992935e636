"""The engine tests' servers end with the tests, also where those are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STARTING = """
import sys, time, types
from tests.engine import zygote

zygote.MODULES = ()
sys.modules["sglang.launch_server"] = types.SimpleNamespace(load_plugins=lambda: time.sleep(600))
zygote.main()
"""
"""The process that servers are forked from, with servers that take their time and import nothing."""


@pytest.mark.parametrize("killed", [False, True])
def test_servers_end_with_what_they_were_forked_from(tmp_path: Path, killed: bool) -> None:
    """Where the tests are killed, it reads the end of its input."""
    request = {"arguments": [], "environment": {**os.environ}, "log": str(tmp_path / "server.log")}
    command = [sys.executable, "-c", STARTING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        print(json.dumps(request), file=process.stdin, flush=True)
        server = psutil.Process(int(process.stdout.readline()))
        assert server.is_running()
        if killed:
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.close()
    assert not psutil.wait_procs([server], timeout=10)[1]

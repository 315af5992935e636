"""A server whose scheduler refuses a model ends with a plain exit code, and so does all it started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from adaserve.patches.scheduler import refused_starts

ENDING = """
import os, subprocess, sys
from adaserve.patches.scheduler import refused_starts
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
refused_starts.is_active = lambda: True
refused_starts._end(lambda *_: print("killed"), os.getpid())
"""


def test_a_refused_server_is_not_killed() -> None:
    """A shell would say "Killed", as it does where the host has no memory left."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done
    assert not psutil.pid_exists(int(done.stdout)), "what it started runs on"


def test_others_are_killed_as_sglang_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes, also where no settings are known, and servers of other algorithms."""
    asked: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> None:
        asked.append((args, kwargs))

    refused_starts._end(original, os.getpid(), include_parent=False, wait_timeout=60)
    refused_starts._end(original, os.getpid() + 1)
    monkeypatch.setattr(refused_starts, "is_active", lambda: False)
    refused_starts._end(original, os.getpid())
    own, other = os.getpid(), os.getpid() + 1
    assert asked == [((own, False), {"wait_timeout": 60}), ((other, True), {}), ((own, True), {})]

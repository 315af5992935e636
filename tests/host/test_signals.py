"""A server that hangs says where."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from adaserve.host.lifetime import PARENT_ENV
from adaserve.host.signals import STACK_DUMP_SIGNAL


@pytest.mark.parametrize("started_by_us", [True, False])
def test_the_signal_is_ours_in_servers_alone(started_by_us: bool) -> None:
    """A program that embeds SGLang's engine may use it."""
    code = "import adaserve.host.signals as s; s.dump_stacks_on_signal(); print('up', flush=True); input()"
    env = {name: value for name, value in os.environ.items() if name != PARENT_ENV}
    env |= {PARENT_ENV: "1"} if started_by_us else {}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(STACK_DUMP_SIGNAL)
        said = process.communicate(b"\n", timeout=10)[1]
    assert (b"most recent call first" in said) == started_by_us
    assert process.returncode == (0 if started_by_us else -STACK_DUMP_SIGNAL)

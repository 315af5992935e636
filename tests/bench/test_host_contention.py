"""What other programs use of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from adaserve.bench.host_contention import HostContention
from adaserve.host import cpu_times

SPIN = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
APART = f"import os; os.fork() and os._exit(0); os.setsid(); exec({SPIN!r})"


def busy_s() -> float:
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


def test_our_children_are_not_others() -> None:
    others, before_s = HostContention(), busy_s()
    with others.watched():
        subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert others.cpu_s < busy_s() - before_s - 1.2


class Host:
    """Processor times as psutil tells them, and a clock: a second has passed at each look."""

    def __init__(self) -> None:
        self.one = SimpleNamespace(
            user=50.0,
            nice=0.0,
            system=5.0,
            irq=0.0,
            softirq=0.0,
            steal=0.0,
            idle=100.0,
            iowait=9.0,
            guest=7.0,
        )
        self.processors = [self.one, *[SimpleNamespace(user=3.0)] * 7]
        self.mine = SimpleNamespace(user=1.0, system=1.0, children_user=0.0, children_system=0.0)
        self.child = SimpleNamespace(user=0.0, system=0.0, children_user=0.0, children_system=0.0)
        self.child_lives, self.now_s = True, 0.0

    def process(self) -> Any:
        def of_the_child() -> Any:
            if not self.child_lives:
                raise psutil.NoSuchProcess(2)
            return self.child

        child = SimpleNamespace(cpu_times=of_the_child)
        return SimpleNamespace(cpu_times=lambda: self.mine, children=lambda recursive: [child] * recursive)

    def perf_counter(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: made.processors)
    monkeypatch.setattr(psutil, "Process", made.process)
    monkeypatch.setattr(cpu_times, "time", made)
    monkeypatch.setattr(cpu_times, "least_quota", lambda: None)
    return made


def test_what_is_neither_ours_nor_our_childrens_is_others(host: Host) -> None:
    others = HostContention()
    with others.watched():
        host.one.user += 3.0
        host.one.steal += 1.0
        host.one.idle += 5.0
        host.one.iowait += 5.0
        host.one.guest += 2.0  # is among the user's
        host.mine.user += 0.5
        host.mine.children_system += 0.25
        host.child.user += 0.25
    assert others.cpu_s == 3.0 and others.share == 3 / 8
    with others.watched():
        host.one.nice += 2.0
    assert others.cpu_s == 5.0 and others.share == 5 / 16, "one adds up what it has seen"


def test_a_child_that_ends_was_ours(host: Host) -> None:
    """Its time becomes that of its parent's ended children."""
    host.child.user = 2.0
    others = HostContention()
    with others.watched():
        host.one.user += 1.0
        host.child_lives, host.mine.children_user = False, 3.0
    assert others.cpu_s == 0.0 == others.share


@pytest.mark.quiet
@pytest.mark.skipif(os.environ.get("ADASERVE_QUIET") != "1", reason="needs a quiet machine: ADASERVE_QUIET=1")
def test_what_nobody_of_us_started_is() -> None:
    others = HostContention()
    with others.watched():
        subprocess.run([sys.executable, "-c", APART], check=True)
        time.sleep(3.0)
    assert others.cpu_s > 1.0 and 0 < others.share <= 1

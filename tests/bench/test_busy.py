"""What other programs use of this machine."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from adaserve.bench.busy import OtherPrograms

SPIN = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
APART = f"import os; os.fork() and os._exit(0); os.setsid(); exec({SPIN!r})"


def busy_s() -> float:
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


def test_our_children_are_not_others() -> None:
    others, before_s = OtherPrograms(), busy_s()
    with others.watched():
        subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert others.cpu_s < busy_s() - before_s - 1.2


def test_what_nobody_of_us_started_is() -> None:
    others = OtherPrograms()
    with others.watched():
        subprocess.run([sys.executable, "-c", APART], check=True)
        time.sleep(3.0)
    assert others.cpu_s > 1.0 and 0 < others.share <= 1

"""What other programs, and other guests of a shared host, use of this machine while something is measured."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

BUSY = 0.15
"""Share of all cores that other programs may use without being mentioned."""
SLOW = 0.12
"""How much slower than usual a host may be without that being mentioned. Other guests of a shared host slow
down its memory, which no look at processes shows.
"""


@dataclass
class OtherPrograms:
    """Processor seconds that everything but this process and its children used while it was watched.

    What a hypervisor gave to other guests meanwhile (``steal``) is among them."""

    cpu_s: float = 0.0
    core_s: float = 0.0  # seconds x cores

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts what happens inside the ``with`` block."""
        before_s, start_s = _others_s(), time.monotonic()
        try:
            yield
        finally:
            self.cpu_s += max(0.0, _others_s() - before_s)
            self.core_s += (time.monotonic() - start_s) * (os.cpu_count() or 1)

    @property
    def share(self) -> float:
        """Of all cores, 0 to 1."""
        return min(1.0, self.cpu_s / self.core_s) if self.core_s else 0.0


def _others_s() -> float:
    """Busy seconds of all cores since the system started, without those of this process and its children."""
    times = psutil.cpu_times()
    # Linux counts a guest's time as its host's user time already.
    busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    ours = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            t = process.cpu_times()
            ours += t.user + t.system + t.children_user + t.children_system
    return float(busy - ours)

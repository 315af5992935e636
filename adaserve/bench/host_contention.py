"""What other programs, and other guests of a shared host, use of this machine while something is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from adaserve.host.cpu_times import CpuTimes

BUSY = 0.15
"""Share of our processors that other programs may use without being mentioned."""
SLOW = 0.12
"""How much slower than usual a host may be without that being mentioned. Other guests of a shared host slow
down its memory, which no look at processes shows.
"""


@dataclass
class HostContention:
    """Processor seconds that were taken from this process and its children while it was watched.

    What a hypervisor gave to other guests meanwhile (``steal``) is among them."""

    cpu_s: float = 0.0
    allowed_s: float = 0.0  # to this process and its children
    _processors: CpuTimes = field(default_factory=CpuTimes, repr=False)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts what happens inside the ``with`` block."""
        before, own_s = self._processors.look(), _own_s()
        try:
            yield
        finally:
            taken = self._processors.taken(before, self._processors.look(), _own_s() - own_s)
            self.cpu_s += taken.others_s
            self.allowed_s += taken.allowed_s

    @property
    def share(self) -> float:
        """What others took, as a share of the processors that we may use, 0 to 1."""
        return self.cpu_s / self.allowed_s if self.allowed_s else 0.0


def _own_s() -> float:
    """Busy seconds of this process and its children, those that have ended among them."""
    ours = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            t = process.cpu_times()
            ours += t.user + t.system + t.children_user + t.children_system
    return float(ours)

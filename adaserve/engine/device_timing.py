"""Durations on the device without waiting for it: CUDA events there, the host's clock on a CPU."""

from __future__ import annotations

import time

import torch

from adaserve.engine.cuda_events import record
from adaserve.engine.device import Mark


class HostMark:
    """The host's clock: on a CPU, everything queued is already done."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, HostMark)
        return later.time_s - self.time_s

    def wait(self) -> None:
        """It has been reached."""


class EventMark:
    """An event after everything queued so far on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        record(self.event, device)

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, EventMark)
        return self.event.elapsed_time(later.event) / 1e3

    def wait(self) -> None:
        self.event.synchronize()


def mark(device: torch.device) -> Mark:
    return EventMark(device) if device.type == "cuda" else HostMark()

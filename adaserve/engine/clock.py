"""Durations on the device without waiting for it: CUDA events there, the host's clock on a CPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from adaserve.engine.device import Mark  # which needs transfers, and these the clock


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


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """Behind everything queued so far on the current stream of ``device``, which has an index.

    Left to itself, ``record`` makes a new object of the stream each time, which takes several times as long
    as all the rest; an iteration has a dozen events, half of them while the device waits."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    stream = _streams.get(key)
    if stream is None:  # torch's streams live for ever
        stream = _streams[key] = torch.cuda.current_stream(device)
    event.record(stream)

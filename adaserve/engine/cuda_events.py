"""CUDA events on the current stream."""

from __future__ import annotations

import torch

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """Behind everything queued so far on the current stream of ``device``, which has an index.

    Left to itself, ``Event.record`` makes a new object of the stream each time, which takes several times as
    long as all the rest; an iteration has a dozen events, half of them while the device waits."""
    event.record(stream_of(device))


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The current stream of ``device``, which has an index."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    stream = _streams.get(key)
    if stream is None:  # torch's streams live for ever
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream

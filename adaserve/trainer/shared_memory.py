"""Memory that server and trainer share: anonymous, bounded, gone with the processes, never a file."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

_HEAD, _TAIL, _DATA = 0, 1, 64
"""Places of the two counters, and where messages begin."""
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes for requests, by where these are. Half as much as in the ``ring`` may be in records that are
    still open, and as much as is ``fresh`` in a round of training, on its way into the ``replay`` memory. The
    twelfth that is left is for copies in transit."""

    ring: int
    fresh: int
    replay: int


def shares(memory_mb: int) -> Shares:
    """Of what ``--adaserve-learn-memory-mb`` allows."""
    sixth = memory_mb * 1_000_000 // 6
    return Shares(sixth, sixth, 2 * sixth)


def memory(fd: int) -> mmap.mmap:
    """The memory behind a descriptor of ``allocate``."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def allocate(size: int) -> int:
    """A descriptor of ``size`` bytes, filled with zeros, which child processes may inherit. Linux only."""
    fd = os.memfd_create("adaserve-learning")
    os.ftruncate(fd, size)
    return fd


class Ring:
    """Messages from one process that writes to one that reads; neither ever waits for the other.

    A message that finds no room is not written, so a reader that died or hangs costs the writer nothing.
    The counters only rise: one is written by the writer alone, the other by the reader alone.
    """

    def __init__(self, fd: int) -> None:
        self._memory = memory(fd)
        self._counters = np.frombuffer(self._memory, np.int64, 2)
        self._data = np.frombuffer(self._memory, np.uint8, offset=_DATA)

    @property
    def capacity(self) -> int:
        return len(self._data)

    @property
    def used(self) -> int:
        """Bytes that wait to be read."""
        return int(self._counters[_HEAD] - self._counters[_TAIL])

    def write(self, message: bytes) -> bool:
        """False when there is no room."""
        if self.used + _LENGTH + len(message) > self.capacity:
            return False
        head = int(self._counters[_HEAD])
        self._put(head, len(message).to_bytes(_LENGTH, "little"))
        self._put(head + _LENGTH, message)
        self._counters[_HEAD] = head + _LENGTH + len(message)
        return True

    def read(self) -> bytes | None:
        """The oldest message; None when there is none."""
        if not self.used:
            return None
        tail = int(self._counters[_TAIL])
        length = int.from_bytes(self._get(tail, _LENGTH), "little")
        message = self._get(tail + _LENGTH, length)
        self._counters[_TAIL] = tail + _LENGTH + length
        return message

    def _put(self, at: int, data: bytes) -> None:
        values, start = np.frombuffer(data, np.uint8), at % self.capacity
        first = min(len(values), self.capacity - start)
        self._data[start : start + first] = values[:first]
        self._data[: len(values) - first] = values[first:]

    def _get(self, at: int, length: int) -> bytes:
        start = at % self.capacity
        first = min(length, self.capacity - start)
        return self._data[start : start + first].tobytes() + self._data[: length - first].tobytes()

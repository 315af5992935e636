"""Records survive their way to the trainer, and the ring never holds more than it has room for."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from adaserve.trainer.records import Record
from adaserve.trainer.shared_memory import Ring, allocate, shares
from tests.trainer.factories import record


@pytest.mark.parametrize("top", [False, True])
def test_a_record_survives(top: bool) -> None:
    sent = record(top=top, seed=2**63 + 1 if not top else 5)
    got = Record.from_bytes(sent.to_bytes())
    for name in ("tokens", "logprobs", "ids"):
        one, other = getattr(sent, name), getattr(got, name)
        assert one is other is None or (np.array_equal(one, other) and one.dtype == other.dtype)
    assert (got.start, got.temperature, got.key) == (sent.start, sent.temperature, sent.key)
    assert len(got) == len(sent) == 10


def ring(size: int) -> tuple[Ring, Ring, int]:
    """The two sides of one ring."""
    fd = allocate(size)
    return Ring(fd), Ring(fd), fd


def test_messages_come_in_order_around_the_end() -> None:
    writer, reader, fd = ring(1000)
    rng, sent, got = random.Random(1), [], []
    for i in range(3000):
        message = bytes([i % 256]) * rng.randrange(0, 300)
        if writer.write(message):
            sent.append(message)
        assert writer.used <= writer.capacity
        if rng.random() < 0.7 and (read := reader.read()) is not None:
            got.append(read)
    while (read := reader.read()) is not None:
        got.append(read)
    assert got == sent and 1000 < len(sent) < 3000
    os.close(fd)


def test_a_reader_that_is_gone_costs_nothing() -> None:
    writer, _, fd = ring(10_000)
    written = sum(writer.write(b"x" * 500) for _ in range(10_000))
    assert written == (10_000 - 64) // 508
    assert os.fstat(fd).st_size == 10_000
    assert not writer.write(b"x" * 20_000), "larger than the ring"
    os.close(fd)


def test_another_process_reads_what_was_written() -> None:
    writer, _, fd = ring(100_000)
    sent = record(seed=3)
    assert writer.write(sent.to_bytes())
    read = (
        "import sys; from adaserve.trainer.shared_memory import Ring\n"
        "from adaserve.trainer.records import Record\n"
        "r = Record.from_bytes(Ring(int(sys.argv[1])).read()); print(len(r), r.tokens.sum())"
    )
    command = [sys.executable, "-c", read, str(fd)]
    out = subprocess.run(command, pass_fds=(fd,), capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(len(sent)), str(sent.tokens.sum())]
    assert writer.used == 0, "what was read makes room"
    os.close(fd)


def test_requests_take_what_is_allowed_and_no_more() -> None:
    """With open records, half as much as the ring, and a round of requests that have left ``fresh``."""
    for memory_mb in (16, 192, 1000):
        room = shares(memory_mb)
        assert room.ring + room.ring // 2 + 2 * room.fresh + room.replay < memory_mb * 1_000_000

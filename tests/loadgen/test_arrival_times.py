"""The time of arrival is the kernel's: a receiver that is busy does not count as the server's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import gevent.socket
import pytest
from fake_server import certificate, running_fake
from test_fidelity import assert_faithful

from adaserve.loadgen import stream
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import run_bench
from adaserve.loadgen.config import BenchConfig, ClassLoad, Endpoint, Length
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.results import iter_records

BUSY_S = 0.05


@dataclass
class Wire:
    """A connection: ``send`` on one end, a timed socket on the other. Times of ``perf_counter``."""

    send: Callable[[bytes], None]
    timed: stream._TimedSocket

    def late_read(self) -> tuple[float, float, float]:
        """Sends, is busy for a while, reads: (time before sending, time before reading, time told)."""
        sent_s = perf_counter()
        self.send(b"x")
        time.sleep(BUSY_S)
        read_s = perf_counter()
        assert self.timed.recv(10) == b"x"
        return sent_s, read_s, self.timed.at_s


@contextmanager
def wire() -> Iterator[Wire]:
    with closing(gevent.socket.create_server(("127.0.0.1", 0))) as listener:
        near = gevent.socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with closing(near), closing(far):
            connection = Wire(far.sendall, stream._TimedSocket(near, perf_counter, 60.0))
            # The first socket of a machine that asks has the kernel begin to stamp; a moment later it does.
            connection.late_read()
            yield connection


def test_a_busy_receiver_is_told_when_the_data_came() -> None:
    with wire() as connection:
        sent_s, read_s, told_s = connection.late_read()
    assert sent_s - 1e-3 <= told_s < read_s


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_was_set_is_not_believed(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    monkeypatch.setattr(stream.time, "time", lambda: wall() + step_s)
    with wire() as connection:
        _, read_s, told_s = connection.late_read()
    assert told_s >= read_s


def test_a_kernel_without_time_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SO_TIMESTAMPNS", 30_000)
    with wire() as connection:
        _, read_s, told_s = connection.late_read()
    assert told_s >= read_s


def test_tls_is_measured_too(tmp_path: Path) -> None:
    """There the time is that of the process; a certificate that nobody signed is refused unless accepted."""
    one = ClassLoad(
        name="chat", tpot_ms=1000, prompt_tokens=Length(median=20), output_tokens=Length(median=20)
    )
    with running_fake(token_ms=20, first_ms=100, certificate=certificate(tmp_path)) as fake:
        config = BenchConfig(
            server=Endpoint(url=fake.url, insecure=True),
            classes={"chat": one},
            arrivals=Arrivals(kind="constant", rps=5),
            duration_s=2,
        )
        summary = run_bench(config, tmp_path / "run")
        with pytest.raises(LoadgenError, match="insecure: true"):
            run_bench(BenchConfig(server=Endpoint(url=fake.url)), tmp_path / "refused")
        log = fake.log()
    records = list(iter_records(tmp_path / "run"))
    assert len(records) == summary["completed"] == 10
    assert all(r.ttft_s is not None and r.ttft_s >= 0.1 for r in records)
    assert_faithful(records, log)


@pytest.mark.parametrize(
    ("most_s", "most_bytes", "says"), [(0.2, 10**9, "within 0.2 s"), (60.0, 1000, "longer")]
)
def test_an_answer_without_end_is_given_up(
    most_s: float, most_bytes: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte now and then, so that it is never silent, or more than anybody can keep."""
    monkeypatch.setattr(stream, "_MAX_BYTES", most_bytes)
    with wire() as connection:
        timed = stream._TimedSocket(connection.timed._sock, perf_counter, most_s)
        timed.send(b"GET / HTTP/1.1")
        end_s = perf_counter() + 5.0
        with pytest.raises(stream.EndlessError, match=says):
            while perf_counter() < end_s:
                connection.send(b"x" * (1 if most_s < 1 else 500))
                timed.recv(1000)
                gevent.sleep(0.02)

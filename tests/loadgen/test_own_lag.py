"""How late the load generator itself is, and that it says so."""

from __future__ import annotations

import gc
import time
from time import perf_counter

import gevent
import pytest
from fake_server import running_fake
from test_fidelity import BUSY

from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.dispatch import BEAT_S, Dispatcher
from adaserve.loadgen.recorder import LogHistogram
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.loadgen.stream import Target
from adaserve.slo.validity import read_too_late


def lag(busy_s: float) -> LogHistogram:
    """Of a second with one stream, beside something that computes for ``busy_s`` at a time."""

    def compute() -> None:
        while True:
            time.sleep(busy_s)
            gevent.sleep(0.001)

    request = PlannedRequest(0, 0.1, "chat", 1000.0, 1000.0, "Hello", 4, max_tokens=46)
    with running_fake(token_ms=20) as fake:
        dispatcher = Dispatcher(Target(Endpoint(url=fake.url, model="fake")), [request], lambda _: None)
        other = gevent.spawn(compute) if busy_s else None
        try:
            dispatcher.run(perf_counter() + 1.0)  # the collection before it may take half of that
        finally:
            gc.unfreeze()
            if other is not None:
                other.kill()
    return dispatcher.read_lag


def test_a_load_generator_that_is_slower_than_the_server_says_so() -> None:
    late = lag(busy_s=0.2)
    (why,) = read_too_late(late.percentile(99))
    assert why.startswith("answers were read late: p99 of the load generator's own lag is ")
    assert (late.percentile(99) or 0) > 150
    assert late.n > 0.7 / BEAT_S, "beats that it was too late for count"


def test_lag_that_no_figure_notices_is_none() -> None:
    fast, slow = LogHistogram(), LogHistogram()
    for _ in range(1000):
        fast.add(3.0)
    slow.add(400.0)
    assert read_too_late(LogHistogram().percentile(99)) == read_too_late(fast.percentile(99)) == []
    fast.merge([*slow.counts.items()])
    assert fast.n == 1001 and read_too_late(fast.percentile(99)) == []
    fast.merge([(key, 20 * count) for key, count in slow.counts.items()])
    assert read_too_late(fast.percentile(99))


@pytest.mark.quiet
@pytest.mark.skipif(BUSY, reason="needs a quiet machine: ADASERVE_QUIET=1")
def test_a_quiet_load_generator_is_in_time() -> None:
    assert read_too_late(lag(busy_s=0).percentile(99)) == []

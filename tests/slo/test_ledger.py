"""What the scheduler process settles when a request finishes: its times, its SLO, why it was slow."""

from __future__ import annotations

import gc
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest

from adaserve.slo.classes import SLO, SLOConfig
from adaserve.slo.events import IterationSample
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.request_log import RequestLog
from adaserve.slo.resolve import RequestSLO, resolve
from adaserve.slo.stats import SLOStats
from adaserve.slo.trace import Trace
from adaserve.slo.trace_formats import read_trace

BASELINE_S = 0.020


class FINISH_ABORT:  # noqa: N801 (the ledger knows SGLang's class by its name)
    def __init__(self, status_code: int | None = None) -> None:
        self.status_code = status_code


class FINISH_LENGTH:  # noqa: N801
    pass


class Req:
    """The part of SGLang's ``Req`` that the ledger reads; 11 tokens at 20 ms after a prefill at 1.0 s."""

    def __init__(self, rid: str = "r", **changes: Any) -> None:
        self.rid = rid
        slo = resolve({"x-slo-class": "coding"}, None, SLOConfig())
        self.sampling_params = SimpleNamespace(custom_params=slo.in_params(None), max_new_tokens=11)
        self.output_ids_through_stop = list(range(11))
        self.finished_reason: Any = None
        self.spec_verify_ct = 4
        self.retraction_count = 0
        times = {
            "created_time": 0.0,
            "scheduler_recv_time": 0.9,
            "wait_queue_entry_time": 0.91,
            "prefill_finished_time": 1.0,
            "last_prefill_finished_time": 1.0,
            "last_decode_finish_time": 1.2,
        }
        times.update({k: changes.pop(k) for k in list(changes) if k in times})
        self.time_stats = SimpleNamespace(**times)
        for key, value in changes.items():
            setattr(self, key, value)


def ledger() -> SLOLedger:
    return SLOLedger(BASELINE_S, SLOStats(SLOConfig()))


def decode(books: SLOLedger, *reqs: Req, **sources: list[list[int]]) -> None:
    """One iteration, of plain decoding where no ``sources`` are given."""
    n = len(reqs)
    sample = IterationSample(
        running=n, depth=0, width=0, budget=n, verify_tokens=n, drafted_tokens=0, new_tokens=n,
        expected_tokens=n, draft_s=0.0, select_s=0.0, verify_s=0.02, total_s=0.02,
    )  # fmt: skip
    books.iteration([r.rid for r in reqs], sample, {name: np.array(of) for name, of in sources.items()})


def counted(books: SLOLedger) -> dict[str, Any]:
    """Sums of all buckets."""
    total: dict[str, Any] = {"requests": 0, "failed": 0, "met": 0, "tokens": 0}
    for bucket in books.stats.state()["buckets"]:
        for c in bucket["classes"].values():
            total = {k: v + c[k] for k, v in total.items()}
    return total


def reasons(books: SLOLedger) -> list[str]:
    return [e["reason"] for e in books.stats.state()["slow"]]


def test_times_are_those_of_the_answer() -> None:
    books = ledger()
    report = books.close(Req())
    assert report["tpot_ms"] == pytest.approx(20) and report["ttft_ms"] == pytest.approx(100)
    assert report["tpot_slo_ms"] == pytest.approx(24) and report["met"] is True
    assert counted(books) == {"requests": 1, "failed": 0, "met": 1, "tokens": 11}
    assert books.stats.state()["stated"] == 1, "it named a class"


def test_ttft_counts_from_the_arrival_at_the_http_process() -> None:
    """The scheduler looked into its mailbox at 0.9 s; the request had come at 0.4 s."""
    assert ledger().close(Req(created_time=0.4))["ttft_ms"] == pytest.approx(600)


def test_tokens_behind_the_stop_do_not_make_a_request_faster() -> None:
    report = ledger().close(Req(output_ids_through_stop=[1, 2, 3, 4, 5], output_ids=list(range(11))))
    assert report["tpot_ms"] == pytest.approx(50) and report["met"] is False


def test_a_request_that_ends_in_the_prefill_after_its_retraction() -> None:
    """A retraction resets the decode times: the last token came with the second prefill."""
    books = ledger()
    late = Req(last_decode_finish_time=0.0, last_prefill_finished_time=3.0, retraction_count=1)
    assert books.close(late)["tpot_ms"] == pytest.approx(200)
    assert reasons(books) == ["it was retracted once: the KV cache was full"]


def test_a_request_that_ends_while_it_waits_again_has_failed_and_has_no_tpot() -> None:
    """A retraction resets the times of its tokens: their mean would lie far below zero."""
    books = ledger()
    gone = {"last_decode_finish_time": 0.0, "last_prefill_finished_time": 0.0, "retraction_count": 1}
    report = books.close(Req(finished_reason=FINISH_ABORT(503), **gone))
    assert report["tpot_ms"] is None and report["met"] is False
    assert (counted(books)["requests"], counted(books)["failed"]) == (1, 1)


@pytest.mark.parametrize(
    ("status", "requests", "failed"), [(None, 0, 0), (400, 0, 0), (500, 1, 1), (503, 1, 1)]
)
def test_aborts(status: int | None, requests: int, failed: int) -> None:
    """A client that leaves is nobody's miss; a request that the server gives up is one."""
    books = ledger()
    assert books.close(Req(finished_reason=FINISH_ABORT(status)))["met"] is False
    assert (counted(books)["requests"], counted(books)["failed"]) == (requests, failed)
    assert reasons(books) == ["it failed"] * failed


def test_health_checks_are_not_traffic() -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    books = ledger()
    books.close(Req(f"{HEALTH_CHECK_RID_PREFIX}_1700000000.5"))
    assert counted(books)["requests"] == 0


def test_the_request_with_which_sglang_starts_is_not_traffic() -> None:
    """It would be a request of the default class, and a miss where the first forward is slow."""
    books = ledger()
    own = Req()
    own.sampling_params.custom_params = RequestSLO("chat", tpot_s=0.001, counted=False).in_params(None)
    books.close(own)
    assert counted(books)["requests"] == 0


def test_requests_for_no_tokens_are_not_traffic() -> None:
    """n = 4 with all four missed is 0 of 4, though SGLang warms the cache with a fifth; so are scores."""
    books = ledger()
    warm_up = Req("warm-up", output_ids_through_stop=[1])
    warm_up.sampling_params.max_new_tokens = 0
    books.close(warm_up)
    for k in range(4):
        books.close(Req(f"r{k}", last_decode_finish_time=1.9))
    assert counted(books) == {"requests": 4, "failed": 0, "met": 0, "tokens": 44}


def test_how_long_answers_are_is_known_by_those_that_were_served() -> None:
    books = ledger()
    for reason in (FINISH_ABORT(), FINISH_ABORT(500), FINISH_LENGTH()):
        for _ in range(20):
            books.close(Req(finished_reason=reason))
    assert not books.lengths, "nobody knows where they would have ended"
    for _ in range(20):
        books.close(Req())
    assert books.lengths.left("coding", 0) == len(Req().output_ids_through_stop) - 1


def test_prefills_of_others_are_named() -> None:
    books = ledger()
    slow, other = Req("slow", last_decode_finish_time=1.6), Req("other")
    books.prefilled([slow], 0.2)  # its own: no stall
    decode(books, slow)
    books.prefilled([other], 0.3)
    decode(books, slow, other)
    books.prefilled([Req("late")], 5.0)  # after its last iteration: no stall of this request
    books.close(slow)
    assert reasons(books) == ["prefills of other requests took 300 ms of 600 ms"]


def test_its_own_second_prefill_is_no_stall() -> None:
    books = ledger()
    back = Req("back", last_decode_finish_time=1.6)
    books.prefilled([back], 0.2)
    decode(books, back)
    books.prefilled([back], 0.3)
    decode(books, back)
    books.close(back)
    assert "prefills of other requests" not in reasons(books)[0]


def test_a_chunked_prefill_counts_from_its_end() -> None:
    books = ledger()
    long = Req("long", last_decode_finish_time=1.6)
    for _ in range(3):
        books.prefilled([Req("other")], 0.5)
        books.prefilled([long], 0.5)
    decode(books, long)
    books.close(long)
    assert "prefills of other requests" not in reasons(books)[0]


def test_each_request_is_told_what_was_drafted_for_it() -> None:
    books, (one, other) = ledger(), (Req("one"), Req("other"))
    books.prefilled([one, other], 0.2)
    decode(books, one, other, model=[[4, 3, 2], [1, 1, 0]])
    decode(books, other, one, model=[[2, 1, 1], [5, 0, 0]], suffix=[[0, 0, 0], [3, 2, 1]])
    model, suffix = (
        {"proposed": 9, "verified": 3, "accepted": 2},
        {"proposed": 3, "verified": 2, "accepted": 1},
    )
    assert books.close(one)["drafts"] == {"model": model, "suffix": suffix}
    assert books.close(other)["drafts"]["model"] == {"proposed": 3, "verified": 2, "accepted": 1}


def test_load_is_named() -> None:
    books = ledger()
    slow, others = Req("slow", last_decode_finish_time=1.6), [Req(f"o{k}") for k in range(7)]
    books.prefilled([slow, *others], 0.2)
    for _ in range(4):
        decode(books, slow, *others)
    books.close(slow)
    assert reasons(books) == ["150 ms per iteration: each needed 6.3 tokens but gave 2.5 (8 running)"]


def test_queue_and_kv_use_reach_the_page() -> None:
    books = ledger()
    books.load(queue=3, kv_use=0.25)
    decode(books, Req())
    last = books.stats.state()["last"]
    assert (last["queue"], last["kv_use"]) == (3, 0.25)


def test_requests_that_nobody_closes_are_forgotten() -> None:
    """SGLang drops a request that is aborted while it waits, for example after a retraction."""
    books = ledger()
    for k in range(50):
        req = Req(f"r{k}")
        books.prefilled([req], 0.01)
        decode(books, req)
    del req
    gc.collect()
    assert len(books._company) == len(books._by_rid) == len(books._slos) == 0


def test_an_slo_is_settled_once() -> None:
    """The baseline may be learned anew while a request runs: it is judged by what it started with."""
    books = ledger()
    req, later = Req(), Req("later")
    assert books.slo(req).tpot_s == pytest.approx(0.024)
    books.baseline_s = 0.040
    assert books.slo(req).tpot_s == pytest.approx(0.024) and books.close(req)["tpot_slo_ms"] == 24
    assert books.slo(later).tpot_s == pytest.approx(0.048)


def test_finished_requests_make_a_trace(tmp_path: Path) -> None:
    """Two servers may append to one file; requests are written when they finish."""
    path = tmp_path / "requests.jsonl"
    logs = [RequestLog(path), RequestLog(path)]
    books = [SLOLedger(BASELINE_S, SLOStats(SLOConfig()), log) for log in logs]
    now_s = time.perf_counter()
    plain = Req("plain", sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=11))
    for book, req, arrival_s in ((books[0], Req("late"), now_s), (books[1], plain, now_s - 2.5)):
        req.origin_input_ids = list(range(7))
        req.time_stats.created_time = arrival_s
        book.close(req)
    aborted = Req("aborted", finished_reason=FINISH_ABORT(), origin_input_ids=[1])
    books[0].close(aborted)
    assert len(path.read_text().splitlines()) == 2, "what a client took back is not load to plan for"
    first, second = Trace.merged([read_trace(path)]).rows
    assert (first.slo_class, first.slo_tpot_ms, first.prompt_tokens, first.output_tokens) == (
        None,
        None,
        7,
        11,
    )
    assert (second.slo_class, second.slo_tpot_ms) == ("coding", pytest.approx(24.0))
    assert first.arrival_s == 0.0 and second.arrival_s == pytest.approx(2.5, abs=0.1)


def test_a_full_disk_costs_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    books = SLOLedger(BASELINE_S, SLOStats(SLOConfig()), log)
    for rid in ("a", "b"):
        assert books.close(Req(rid, origin_input_ids=[1]))["met"]
    assert caplog.text.count("no longer recorded") == 1


def test_what_a_full_disk_leaves_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line fits in part, and the next start appends to what is there."""
    path, write = tmp_path / "requests.jsonl", os.write
    log = RequestLog(path)
    books = SLOLedger(BASELINE_S, SLOStats(SLOConfig()), log)
    books.close(Req("whole", origin_input_ids=[1]))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: write(file, line[:20]))
        books.close(Req("cut", origin_input_ids=[1]))
    assert len(read_trace(path)) == 1
    again = RequestLog(path)
    SLOLedger(BASELINE_S, SLOStats(SLOConfig()), again).close(Req("later", origin_input_ids=[1]))
    assert len(read_trace(path, sort=True)) == 2


def test_a_request_without_an_slo() -> None:
    plain = Req(sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=11))
    slo = ledger().slo(plain)
    assert (slo.slo_class, slo.tpot_s, slo.ttft_s) == ("default", math.inf, math.inf)


def test_a_prediction_is_compared_with_what_was_delivered() -> None:
    registry = prometheus_client.CollectorRegistry()
    books = SLOLedger(BASELINE_S, SLOStats(SLOConfig(), ServerMetrics("m", registry)))
    reqs = [(Req(), predicted_s) for predicted_s in (0.022, 0.030, None)]  # delivered: 20 ms per token
    for req, predicted_s in reqs:
        if predicted_s is not None:
            books.predict(req, predicted_s)
    for req, predicted_s in reqs:
        report = books.close(req)
        assert report["tpot_predicted_ms"] == (None if predicted_s is None else predicted_s * 1e3)
    name, labels = "adaserve:predicted_tpot_error", {"model_name": "m", "slo_class": "coding"}
    assert registry.get_sample_value(f"{name}_count", labels) == 2
    for edge, below in (("0.05", 0), ("0.15", 1), ("1.0", 2)):  # +10% and +50%
        assert registry.get_sample_value(f"{name}_bucket", {**labels, "le": edge}) == below
    gave_up = Req(finished_reason=FINISH_ABORT(500))
    books.predict(gave_up, 0.022)
    books.close(gave_up)
    assert registry.get_sample_value(f"{name}_count", labels) == 2, "a failed request has no TPOT to compare"


def test_predictions_learn_from_what_was_delivered() -> None:
    """The load alone says 40 ms, delivered are 20 ms per token: so will be the next one's."""
    books = ledger()
    for expected_ms in (40.0, 20.0):
        req = Req()
        books.predict(req, 0.040)
        assert books.close(req)["tpot_predicted_ms"] == pytest.approx(expected_ms)
    gave_up = Req(finished_reason=FINISH_ABORT(500))
    books.predict(gave_up, 0.040)
    books.close(gave_up)
    assert books.delivered.predict(SLO("coding"), 0.040, 0.0) == pytest.approx(0.020)


def test_who_limits_speculation_says_nothing_of_its_class() -> None:
    books, params = ledger(), RequestSLO("coding", 0.050, speculation=0).in_params(None)
    req = Req(sampling_params=SimpleNamespace(custom_params=params, max_new_tokens=11))
    books.predict(req, 0.010)
    assert books.close(req)["tpot_predicted_ms"] == pytest.approx(10.0)
    assert books.delivered.predict(SLO("coding"), 0.010, 0.0) == pytest.approx(0.010)


def test_the_gate_is_noted_for_one_iteration() -> None:
    books, req = ledger(), Req()
    books.gate([("chat", 0.2), ("coding", 0.5), ("chat", 1.5)])
    decode(books, req)
    assert books.stats.state()["last"]["gated"] == {"chat": [2, 1.5], "coding": [1, 0.5]}
    decode(books, req)
    assert books.stats.state()["last"]["gated"] == {}, "nobody said that they still wait"

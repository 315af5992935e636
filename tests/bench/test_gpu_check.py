"""The GPU check's judgement, on made-up measurements; the whole of it runs in ``--device cpu``."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from adaserve.bench.gpu_check import answers, shapes
from adaserve.bench.gpu_check.answers import Answer, Pace
from adaserve.bench.gpu_check.check import Check, Sections, StageError
from adaserve.bench.gpu_check.cli import _common, _costs, _mixed, _plan
from adaserve.bench.gpu_check.findings import CheckPlan, Findings, resume
from adaserve.bench.gpu_check.goals import outside_share, targets
from adaserve.bench.gpu_check.mixed import run_mixed
from adaserve.bench.gpu_check.rerun import forget
from adaserve.bench.gpu_check.systems import ADASERVE, NONE, OWN, PLAIN, Pair, serving, spec_of
from adaserve.bench.gpu_check.torch_profiles import summary
from adaserve.cli import app
from adaserve.loadgen.errors import LoadgenError
from adaserve.pair.widen import Width
from adaserve.server import ServerError

DEFAULTS, ON_CPU = CheckPlan(), Pair("t", "d", "cpu")


class Quiet(Check):
    def __init__(self, out: Path, plan: CheckPlan = DEFAULTS, pair: Pair = ON_CPU, **options: Any) -> None:
        super().__init__(pair, plan, out, Console(quiet=True), **options)


class Staged(Quiet):
    """Its stages, "server:stage", are a test's own."""

    def __init__(self, out: Path, stages: dict[str, Any], **options: Any) -> None:
        self.stages = stages
        super().__init__(out, **options)

    def _plain(self) -> Sections:
        return self._own(PLAIN)

    def _adaserve(self) -> Sections:
        return self._own(ADASERVE)

    def _own(self, kind: str) -> Sections:
        return {n.partition(":")[2]: s for n, s in self.stages.items() if n.startswith(f"{kind}:")}


@pytest.fixture
def url() -> Iterator[str]:
    """A server that counts on from the last prompt token, is sure of odd tokens only, and verifies once for
    every two tokens after the first."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            count, last = body["sampling_params"]["max_new_tokens"], body["input_ids"][-1]
            ids = [last + 1 + i for i in range(count)]
            meta: dict[str, Any] = {"spec_verify_ct": count // 2}
            if ids[0] != 100:
                meta["decode_throughput"] = 20.0 * len(ids)
            if body.get("return_logprob"):
                meta["output_top_logprobs"] = [[[-0.1, i, None], [-0.1 - i % 2, 0, None]] for i in ids]
            answer = json.dumps({"output_ids": ids, "meta_info": meta}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_client(url: str) -> None:
    given = answers.generate(url, [[5], [1, 10]], 3, margins=True)
    assert [a.output_ids for a in given] == [(6, 7, 8), (11, 12, 13)]
    assert given[0].margins == pytest.approx((0.0, 1.0, 0.0))
    pace = answers.pace(url, [[5]] * 4, 10)
    assert pace.ms == pytest.approx(5.0) and pace.accept_length == 9 / 5
    with pytest.raises(ValueError, match="enable-metrics"):
        answers.pace(url, [[5], [99]], 9)


def test_outputs_are_compared_with_mercy_for_ties(tmp_path: Path) -> None:
    check = Quiet(tmp_path)
    check.found.margin_noise = 0.03
    sure = (1.0, 1.0, 1.0)
    check.found.reference = [Answer((1, 2, 3), sure)] * 2 + [Answer((1, 2, 3), (1.0, 0.05, 1.0))] * 2
    found = check._compare([Answer(ids) for ids in [(1, 2, 3), (1, 2, 9), (1, 7, 7), (9, 2, 3)]])
    assert (found["requests"], found["identical"], found["ties"]) == (4, 1, 1)
    assert found["widest_tie"] == 0.05 and found["tie_margin"] == 0.09
    check.found.margin_noise = 0.01
    assert check._compare([Answer((1, 7, 7))] * 3)["ties"] == 0, "decided, where rounding does so little"
    broken_off = check._compare([Answer((1, 2)), Answer(())])
    assert (broken_off["identical"], len(broken_off["different"])) == (0, 2)
    assert found["different"] == [
        {"prompt": 1, "token": 2, "margin": 1.0}, {"prompt": 3, "token": 0, "margin": 1.0},
    ]  # fmt: skip


def test_margins_say_what_rounding_does() -> None:
    """SGLang against itself: after equal tokens margins differ by rounding, and where tokens change places by
    both of theirs."""
    right = [Answer((1, 2, 3), (1.0, 0.5, 0.4)), Answer((1, 2), (0.9, 2.0))]
    assert answers.margin_noise(right, right) == 0.0
    same = Answer((1, 2, 3), (1.01, 0.48, 0.4))
    assert answers.margin_noise([same], right) == pytest.approx(0.02)
    other = Answer((1, 7, 3), (1.01, 0.1, 9.0))
    assert answers.margin_noise([other, right[1]], right) == pytest.approx(0.6)


def test_tpot_is_measured_on_text_that_loops_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same prompts for all servers, with or without outputs to choose by."""
    asked: list[list[list[int]]] = []

    def pace(_: str, prompts: list[list[int]], *__: Any) -> Pace:
        asked.append(prompts)
        return Pace(1.0)

    monkeypatch.setattr(answers, "pace", pace)
    monkeypatch.setattr(answers, "generate", lambda *_: [Answer(())])
    loops, text = Answer((1, 2) * 32), Answer(tuple(range(64)))
    made = Quiet(tmp_path, CheckPlan(batches=(8,), rounds=4))
    made._prompts = [[i] for i in range(64)]
    made.found.reference = [loops, text] * 32
    made._speed(FakeServer(), [PLAIN])  # type: ignore[arg-type]
    assert [i for prompts in asked for (i,) in prompts] == list(range(1, 64, 2))
    assert made.found.distinct_8grams == 1.0
    made.found.reference = []
    made._speed(FakeServer(), [OWN[0]])  # type: ignore[arg-type]
    assert asked[4:] == asked[:4]
    without = Quiet(tmp_path, CheckPlan(batches=(8,), rounds=1))
    without._prompts = made._prompts
    without._speed(FakeServer(), [PLAIN])  # type: ignore[arg-type]
    assert asked[-1] == [[i] for i in range(8)] and without.found.distinct_8grams is None


def findings() -> Findings:
    clean = {"requests": 2, "identical": 2, "ties": 0, "different": []}
    spent = {"loop_models_s": 0.49, "loop_s": 0.5}
    goodput = {"priced": 90.0, "adaserve": 110.0, OWN[0]: 100.0, OWN[1]: 99.0}
    mixed = {
        "0.5": {"priced": {"token_goodput": 5.0}},
        "1.3": {name: {"token_goodput": value} for name, value in goodput.items()},
    }
    return Findings(
        exact={
            **dict.fromkeys(("priced", "adaserve", "chain-4", "none"), clean),
            f"{PLAIN}, one by one": {**clean, "different": [{}]},
        },
        tpot_ms={
            PLAIN: {1: 10.0, 32: 12.0},
            "adaserve": {1: 4.0, 32: 9.0},
            OWN[0]: {1: 6.0, 32: 8.1},
            OWN[1]: {1: 5.0, 32: 10.0},
        },
        details={"adaserve": {32: spent}, "verification": {"ratio": 1.2}},
        mixed=mixed,
    )


PLAN = CheckPlan(batches=(1, 32), exact_prompts=2, loads=(0.5, 1.3))
"""All of it was measured in ``findings``."""


def test_targets() -> None:
    met = {t["target"]: (t["value"], t["met"]) for t in targets(findings(), PLAN)}
    assert list(met.values()) == [
        (0, True),
        (2.5, True),
        (pytest.approx(0.9), False),
        (1.2, False),
        (pytest.approx(0.02), True),
        (1.1, True),
    ]
    assert not any(t["missing"] for t in targets(findings(), PLAN))


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    rows = targets(Findings(), CheckPlan())
    assert [(t["value"], t["met"]) for t in rows] == [(None, None)] * 6
    assert all(t["missing"] for t in rows)


EXACT, BATCH_1, EVERY_BATCH, GOODPUT = 0, 1, 2, 5


def target(number: int, found: Findings, plan: CheckPlan = PLAN) -> tuple[bool | None, list[str]]:
    row = targets(found, plan)[number]
    return row["met"], row["missing"]


def test_a_target_is_not_met_by_halves() -> None:
    """What is missing could still miss it; what misses it already does."""
    found = findings()
    del found.exact["chain-4"]
    assert target(EXACT, found) == (None, ["outputs of chain-4"])
    found.exact["none"] = {"requests": 2, "identical": 1, "ties": 0, "different": [{}]}
    assert target(EXACT, found)[0] is False
    found = findings()
    found.exact["none"] = {**found.exact["none"], "requests": 1}
    assert target(EXACT, found) == (None, ["outputs of none"])

    found = findings()
    found.tpot_ms["adaserve"][32] = 7.0
    assert target(EVERY_BATCH, found) == (True, [])
    more = replace(PLAN, batches=(1, 32, 64))
    missing = [f"TPOT of {name} at batch 64" for name in (*OWN, "priced")]
    assert target(EVERY_BATCH, found, more) == (None, missing)
    del found.tpot_ms[OWN[1]]
    assert target(EVERY_BATCH, found)[0] is None, "the other tree may be faster"
    found.tpot_ms["adaserve"][32] = 9.0
    assert target(EVERY_BATCH, found, more)[0] is False
    del found.tpot_ms[PLAIN][1]
    assert target(BATCH_1, found) == (None, ["TPOT of sglang at batch 1"])


def test_goodput_is_judged_at_the_highest_load_of_the_plan_alone() -> None:
    found = findings()
    plan = replace(PLAN, loads=(0.5, 1.3, 2.0))
    missing = [f"goodput of {name} at load 2" for name in (*OWN, "priced")]
    assert target(GOODPUT, found, plan) == (None, missing)
    found.mixed["1.3"]["adaserve"]["invalid_reasons"] = ["the load generator was late"]
    assert target(GOODPUT, found) == (False, []), "priced alone has less than SGLang"
    found.mixed["1.3"][OWN[0]]["invalid_reasons"] = ["the load generator was late"]
    found.mixed["1.3"]["priced"]["token_goodput"] = 120.0
    assert target(GOODPUT, found) == (None, [f"goodput of {OWN[0]} at load 1.3"])


def test_only_full_verifications_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a batch that fills or runs empty, which verify fewer tokens in less time."""
    from adaserve.bench.gpu_check import verification

    monkeypatch.setattr(verification, "LOOK_EVERY_S", 0.0)
    steps = [(0, 0, 0.0), (2, 70, 0.01), (4, 198, 0.05), (4, 198, 0.05), (6, 326, 0.09), (9, 500, 0.1)]
    reports = iter(steps)
    over = threading.Event()

    class Server:
        def report(self) -> dict[str, Any]:
            iterations, verified, target_s = next(reports, steps[-1])
            if iterations == steps[-1][0]:
                over.set()
            older, newer = {"sums": {"verify_tokens": float(verified)}}, {"sums": {}}
            times = {"iterations": float(iterations), "target_s": target_s}
            return {"times": times, "stats": {"buckets": [older, newer]}}

    server: Any = Server()
    ms, iterations = verification.target_ms(server, lambda: over.wait(10), 64)
    assert iterations == 4 and ms == pytest.approx(20.0)
    reports = iter(steps)
    over.clear()
    with pytest.raises(ServerError, match="verified 63 tokens"):
        verification.target_ms(server, lambda: over.wait(10), 63)
    # Answers that are there at once: the first time some verified less, the second time none did.
    reports = iter([(0, 0, 0.0), (3, 190, 0.05), (3, 190, 0.05), (5, 318, 0.07), steps[-1]])
    assert verification.target_ms(server, lambda: None, 64) == (pytest.approx(10.0), 2)


def test_a_dry_run_claims_no_speed() -> None:
    rows = targets(findings(), PLAN, dry=True)
    assert [t["met"] for t in rows] == [True] + [None] * 5
    assert [t["value"] for t in rows] == [t["value"] for t in targets(findings(), PLAN)]


def test_speed_is_asked_of_the_default_policy_first() -> None:
    found = findings()
    found.details["priced"] = {32: {"loop_models_s": 0.9, "loop_s": 1.0}}
    found.tpot_ms["priced"] = {1: 3.0}
    values = [t["value"] for t in targets(found, PLAN)]
    assert values[1] == pytest.approx(3.3333) and values[4] == pytest.approx(0.1)


def test_the_share_outside_is_taken_over_the_whole_loop() -> None:
    """Also the time between iterations, which the worker does not see."""
    spent = {"decode_s": 3.0, "target_s": 9.0, "draft_s": 9.0, "loop_models_s": 3.5, "loops": 50.0}
    assert outside_share({**spent, "loop_s": 5.0}) == pytest.approx(0.3)
    assert outside_share({**spent, "loop_s": 0.0}) is None and outside_share(None) is None


class FakeServer:
    """Alive until it is stopped."""

    asked = 0
    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.gone = threading.Event()

    @property
    def alive(self) -> bool:
        return not self.gone.is_set()

    def stop(self) -> None:
        self.gone.set()

    give_up = stop

    def report(self) -> dict[str, Any]:
        """The same of every server, but what its graphs took."""
        FakeServer.asked += 1
        device = {"attention": "flashinfer", "captured": True, "draft_graphs": FakeServer.asked}
        return {"latency": {}, "device": device, "times": {}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
    """Servers that a check has started."""
    servers: list[FakeServer] = []

    def serving(*_: Any) -> Any:
        servers.append(FakeServer())
        return nullcontext(servers[-1])

    monkeypatch.setattr("adaserve.bench.gpu_check.check.serving", serving)
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [])
    return servers


def check(out: Path, stages: dict[str, Any], **options: Any) -> dict[str, Any]:
    return Staged(out, stages, **options).run()


def test_a_failing_stage_does_not_cost_the_next(tmp_path: Path, started: list[FakeServer]) -> None:
    """It is run again by the same command; what was done is not, and its results come back."""
    runs: list[str] = []
    broken = True

    def stage(name: str) -> Any:
        def run(server: FakeServer) -> None:
            runs.append(name)
            if name == "dies" and broken:
                server.stop()
                raise ServerError("the machine was taken away")
            if name == "fails" and broken:
                raise ValueError("no such thing")

        return run

    names = ("dies", "fails", "last")
    stages = {**{f"{PLAIN}:{n}": stage(n) for n in names}, f"{ADASERVE}:other": stage("other")}
    report = check(tmp_path, stages)
    assert runs == ["dies", "fails", "last", "other"] and len(started) == 3, "a new server after the death"
    assert report["failed"] == {
        f"{PLAIN}:dies": "the machine was taken away", f"{PLAIN}:fails": "ValueError: no such thing",
    }  # fmt: skip
    assert report["done"] == [f"{PLAIN}:last", f"{ADASERVE}:other"]
    broken = False
    report = check(tmp_path, stages)
    assert runs[4:] == ["dies", "fails"] and report["failed"] == {} and len(report["done"]) == 4
    again = json.loads((tmp_path / "gpu-check.json").read_text())
    assert again["done"] == report["done"] and again["dry_run"]


def test_what_a_process_printed_is_part_of_the_reason(tmp_path: Path, started: list[FakeServer]) -> None:
    def stage(_: FakeServer) -> None:
        raise LoadgenError("the load test ended with code 1:\nline 5\n  import x\nNo module named 'x'")

    report = check(tmp_path, {f"{ADASERVE}:mixed": stage})
    reason = "LoadgenError: the load test ended with code 1: line 5; import x; No module named 'x'"
    assert report["failed"] == {f"{ADASERVE}:mixed": reason}


def test_servers_that_die_at_once_take_no_time_from_others(tmp_path: Path, started: list[FakeServer]) -> None:
    """A second one is started for what is left, and no third."""
    runs: list[str] = []

    def dies(server: FakeServer) -> None:
        runs.append("dies")
        server.stop()
        raise ServerError("an illegal memory access")

    def works(_: FakeServer) -> None:
        runs.append("works")

    stages = {**{f"{PLAIN}:{n}": dies for n in "abcd"}, f"{ADASERVE}:e": works, f"{ADASERVE}:f": dies,
              f"{ADASERVE}:g": dies, f"{ADASERVE}:h": works}  # fmt: skip
    report = check(tmp_path, stages)
    assert runs == ["dies", "dies", "works", "dies", "dies", "works"] and len(started) == 2 + 3
    assert list(report["failed"]) == [f"{PLAIN}:a", f"{PLAIN}:b", f"{ADASERVE}:f", f"{ADASERVE}:g"]
    assert report["skipped"] == {PLAIN: "2 servers ended, each before any stage was done"}


def test_a_server_that_says_something_else_does_not_cost_the_others(
    tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "report", lambda _: {"device": {}})
    stages = {f"{kind}:speed": lambda _: None for kind in (ADASERVE, *OWN)}
    report = check(tmp_path, stages, pair=Pair("t", "d", "cuda"))
    assert report["skipped"] == {ADASERVE: "KeyError: 'latency'"}
    assert report["done"] == [f"{own}:speed" for own in OWN]


def test_servers_start_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured while one starts, not even by AdaServe itself; each ends with the thread that
    started it, and one that dies is replaced."""
    events: list[str] = []
    threads: dict[str, list[threading.Thread]] = {}
    answers_later = threading.Event()

    @contextmanager
    def serving(pair: Pair, kind: str, *_: Any) -> Iterator[FakeServer]:
        here = threading.current_thread()
        threads.setdefault(kind, []).append(here)
        if kind == OWN[1]:
            raise ServerError("no memory")
        if kind == PLAIN:
            assert answers_later.wait(5)
        events.append(f"{kind} answers")
        if kind == OWN[0]:
            answers_later.set()
        try:
            yield FakeServer()
        finally:
            assert threading.current_thread() is here
            events.append(f"{kind} ends")

    def dies(server: FakeServer) -> None:
        events.append("dies")
        server.stop()
        raise ServerError("gone")

    monkeypatch.setattr("adaserve.bench.gpu_check.check.serving", serving)
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [])
    stages = {
        f"{PLAIN}:a": dies,
        f"{PLAIN}:b": lambda _: events.append("b"),
        f"{ADASERVE}:c": lambda _: events.append("c"),
        **{f"{kind}:speed": lambda _, kind=kind: events.append(kind) for kind in OWN},
    }
    report = check(tmp_path, stages, together=True)
    own = OWN[0]
    assert events[:3] == [f"{kind} answers" for kind in (own, PLAIN, ADASERVE)]
    assert events[3:] == [
        "dies", f"{PLAIN} ends", f"{PLAIN} answers", "b", f"{PLAIN} ends", "c", f"{ADASERVE} ends", own,
        f"{own} ends",
    ]  # fmt: skip
    assert report["done"] == [f"{PLAIN}:b", f"{ADASERVE}:c", f"{own}:speed"]
    assert report["skipped"] == {OWN[1]: "no memory"}
    first, second = threads[PLAIN]
    assert first is not threading.main_thread() and second is threading.main_thread()
    events.clear()
    assert check(tmp_path, stages, together=True, only=[f"{PLAIN}:a"])["done"] == report["done"]
    assert f"{ADASERVE} answers" not in events, "what is done needs no server"


def test_servers_that_started_together_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were not needed any more."""
    ended: list[str] = []

    @contextmanager
    def serving(pair: Pair, kind: str, *_: Any) -> Iterator[FakeServer]:
        yield FakeServer()
        ended.append(kind)

    def interrupted(_: FakeServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("adaserve.bench.gpu_check.check.serving", serving)
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [])
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path, {f"{PLAIN}:a": interrupted, f"{ADASERVE}:b": print}, together=True)
    assert sorted(ended) == [ADASERVE, PLAIN]


def test_results_without_graphs_say_so(tmp_path: Path, started: list[FakeServer]) -> None:
    for flags, count in ((("--disable-cuda-graph",), 1), ((), 0)):
        report = check(tmp_path / str(count), {}, pair=Pair("t", "d", "cuda", flags))
        assert len(report["does_not_show"]) == count


def test_mixed_runs_say_what_they_cost_in_ttft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLOs are of TPOT there, so a server that lets prompts wait would look good."""
    kept = {"requests": 9, "slo_attainment": 0.5, "token_goodput": 12.0, "output_throughput": 24.0}
    kept |= {"mean_tpot_ms": 3.0, "p99_tpot_ms": 4.0, "mean_ttft_ms": 5678.0, "p99_ttft_ms": 9876.0}
    kept["accept_length"] = 2.0
    made = {**kept, "by_class": {"chat": {**kept, "failed": 0}}, "invalid_reasons": [], "failed": 0}
    monkeypatch.setattr("adaserve.bench.gpu_check.mixed.run_bench", lambda *_: made)
    server: Any = SimpleNamespace(url="http://127.0.0.1:1")
    new = run_mixed(server, tmp_path, 100.0, 6.0, 5.0, 0, Console(quiet=True))
    assert new == {**kept, "by_class": {"chat": kept}, "invalid_reasons": []}
    console = Console(file=io.StringIO(), width=80)
    nearly = {**new, "slo_attainment": 0.998, "mean_ttft_ms": None}
    console.print(_mixed({"1.3": {"new": new, "nearly": nearly}}))
    shown = {
        line.split()[1]: line.split()[2:] for line in console.file.getvalue().splitlines() if "1.3" in line
    }
    assert shown["new"] == ["50%", "12", "24", "3.0", "4.0", "5678", "9876"]
    assert shown["nearly"][0] == "99.8%", "some requests missed"
    assert shown["nearly"][5] == "-"


def test_what_a_dead_server_did_not_answer_is_no_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load test goes on to its end when its server is gone, and finds that no SLO was met."""

    def drain(_: FakeServer) -> None:
        raise ServerError("gone")

    monkeypatch.setattr("adaserve.bench.gpu_check.check.run_mixed", lambda *_: {"token_goodput": 0.0})
    monkeypatch.setattr(FakeServer, "drain", drain, raising=False)
    alone = Quiet(tmp_path)
    alone.found.tpot_ms, alone.found.done = {PLAIN: {1: 2.0}}, [f"{PLAIN}:speed"]
    with pytest.raises(ServerError):
        alone._mixed(FakeServer(), OWN[0])  # type: ignore[arg-type]
    assert alone.found.mixed == {}


def test_results_come_back(tmp_path: Path, started: list[FakeServer]) -> None:
    def measured(_: Any) -> None:
        made.found.tpot_ms[PLAIN] = {1: 2.0, 8: 3.0}
        made.found.accept_length["priced"] = {1: 4.5}
        made.found.reference = [Answer((1, 2), (0.25, 1.0))]

    stages = {f"{PLAIN}:speed": measured}
    for _ in range(2):
        made = Staged(tmp_path, stages)
        made.run()
        assert made.found.reference == [Answer((1, 2), (0.25, 1.0))]
        assert made.found.tpot_ms == {PLAIN: {1: 2.0, 8: 3.0}}
        assert made.found.accept_length == {"priced": {1: 4.5}}
    assert len(started) == 1
    with pytest.raises(ServerError, match="another --out"):
        check(tmp_path, stages, plan=CheckPlan(tokens=5))


SERVERS_STAGES = {f"{kind}:{n}": lambda _: None for kind in (PLAIN, ADASERVE) for n in ("exactness", "speed")}


def test_calls_for_some_stages_each_make_one_report(tmp_path: Path, started: list[FakeServer]) -> None:
    """Whatever their order, each adds its own to what is there."""
    names = list(SERVERS_STAGES)
    for order in (names, names[::-1]):
        for done, name in enumerate(order, 1):
            report = check(tmp_path / order[0], SERVERS_STAGES, only=[name])
            assert report["done"] == order[:done] and report["other_code"] == []
            assert list(report["code"]) == report["done"]
        servers = len(started)
        assert check(tmp_path / order[0], SERVERS_STAGES)["done"] == order and len(started) == servers


@pytest.mark.parametrize(("what", "differs"), [
    ("gpu", "gpu.name"), ("packages", "packages.torch"), ("SCHEMA_VERSION", "schema_version"),
])  # fmt: skip
def test_results_of_another_host_do_not_mix(
    what: str, differs: str, tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_host(number: int) -> None:
        values: dict[str, Any] = {
            "gpu": lambda: {"name": f"GPU {number}"}, "SCHEMA_VERSION": number,
            "packages": lambda: {"torch": f"{number}"},
        }  # fmt: skip
        monkeypatch.setattr(f"adaserve.bench.gpu_check.check.{what}", values[what])

    of_host(1)
    check(tmp_path, SERVERS_STAGES, only=[f"{PLAIN}:speed"])
    of_host(2)
    with pytest.raises(ServerError, match=f"another {differs}: give another --out"):
        check(tmp_path, SERVERS_STAGES, only=[f"{ADASERVE}:speed"])
    of_host(1)
    assert len(check(tmp_path, SERVERS_STAGES, only=[f"{ADASERVE}:speed"])["done"]) == 2


def everything() -> Findings:
    """What some of the stages leave, all of which were measured."""
    stages = (f"{kind}:{name}" for kind in (PLAIN, ADASERVE, OWN[0]) for name in ("exactness", "speed"))
    done = [*stages, *(f"{ADASERVE}:{n}" for n in ("verification", "profile", "mixed-priced", "mixed-none"))]
    done.append(f"{OWN[0]}:mixed")
    return Findings(
        exact={key: {} for key in (f"{PLAIN}, one by one", "priced", "none", OWN[0])},
        tpot_ms={name: {1: 2.0} for name in (PLAIN, "priced", "none", OWN[0])},
        accept_length={name: {1: 4.5} for name in ("priced", OWN[0])},
        details={"priced": {1: {}}, "verification": {}},
        mixed={"0.5": {key: {} for key in ("priced", "none", OWN[0])}},
        profiles={"1": {}},
        reference=[Answer((1,))],
        done=done,
        code={stage: ["then"] for stage in done},
    )


@pytest.mark.parametrize(("stage", "left", "no_longer"), [
    (f"{ADASERVE}:speed",
     {"tpot_ms": {PLAIN, OWN[0]}, "accept_length": {OWN[0]}, "details": {"verification"}}, []),
    (f"{ADASERVE}:verification", {"details": {"priced"}}, []),
    (f"{ADASERVE}:profile", {"profiles": set()}, []),
    (f"{ADASERVE}:mixed-none", {"mixed": {"priced", OWN[0]}}, []),
    (f"{OWN[0]}:mixed", {"mixed": {"priced", "none"}}, []),
    (f"{OWN[0]}:exactness", {"exact": {f"{PLAIN}, one by one", "priced", "none"}}, []),
    (f"{PLAIN}:exactness", {"exact": set(), "reference": set()},
     [f"{ADASERVE}:exactness", f"{OWN[0]}:exactness"]),
    (f"{PLAIN}:speed", {"tpot_ms": {"priced", "none", OWN[0]}, "mixed": set()},
     [f"{ADASERVE}:mixed-priced", f"{ADASERVE}:mixed-none", f"{OWN[0]}:mixed"]),
])  # fmt: skip
def test_a_stage_is_forgotten_with_what_follows_from_it(
    stage: str, left: dict[str, set[str]], no_longer: list[str]
) -> None:
    found, before = everything(), everything()
    assert forget(found, stage) == {stage, *no_longer}
    assert set(before.done) - set(found.done) == {stage, *no_longer} == set(before.code) - set(found.code)
    for name in ("exact", "tpot_ms", "accept_length", "details", "profiles"):
        assert set(getattr(found, name)) == left.get(name, set(getattr(before, name))), name
    assert set(found.mixed.get("0.5", ())) == left.get("mixed", {*before.mixed["0.5"]})
    assert len(found.reference) == ("reference" not in left)


def test_a_stage_is_measured_again(tmp_path: Path, started: list[FakeServer]) -> None:
    """In the same folder; where that is interrupted it goes on, and the others keep their results."""
    asked: list[str] = []

    def stage(name: str) -> Any:
        def run(_: Any) -> None:
            asked.append(name)
            if len(asked) == 6:
                raise KeyboardInterrupt

        return run

    stages = {name: stage(name) for name in SERVERS_STAGES}
    check(tmp_path, stages)
    speed = f"{ADASERVE}:speed"
    assert len(check(tmp_path, stages, only=[speed])["done"]) == len(asked) == 4
    report = check(tmp_path, stages, only=[speed], again=True)
    assert asked[4:] == [speed] and len(report["done"]) == 4 and report["code"].keys() == {*SERVERS_STAGES}
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path, stages, only=[speed], again=True)
    assert len(json.loads((tmp_path / "gpu-check.json").read_text())["done"]) == 3
    assert len(check(tmp_path, stages)["done"]) == 4 and asked[6:] == [speed]


def test_results_of_another_kernel_do_not_mix(
    tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto takes Triton where FlashInfer cannot be compiled, which may be so in one call alone."""
    found = check(tmp_path, SERVERS_STAGES, only=[f"{ADASERVE}:exactness"])
    inner = FakeServer.report

    def report(self: FakeServer) -> dict[str, Any]:
        said = inner(self)
        return {**said, "device": {**said["device"], "attention": "triton"}}

    with monkeypatch.context() as patch:
        patch.setattr(FakeServer, "report", report)
        other = check(tmp_path, SERVERS_STAGES, only=[f"{ADASERVE}:speed"])
    assert "triton now, and was flashinfer" in other["skipped"][ADASERVE] and other["done"] == found["done"]
    again = check(tmp_path, SERVERS_STAGES, only=[f"{ADASERVE}:speed"])
    assert again["skipped"] == {} and len(again["done"]) == 2
    assert again["device"] == found["device"]


def test_stages_that_other_code_has_measured_are_named(
    tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that was mended between two calls; one of them measured half of a stage."""

    def halves(_: Any) -> None:
        made.found.tpot_ms["priced"] = {1: 2.0}
        made._save()
        if first:
            raise ServerError("the time was up")

    def fails(_: Any) -> None:
        if first:
            raise ServerError("nothing was measured")

    stages = {**SERVERS_STAGES, f"{PLAIN}:speed": fails, f"{ADASERVE}:speed": halves}
    for first in (True, False):
        monkeypatch.setattr("adaserve.bench.gpu_check.check.code_digest", lambda first=first: str(first))
        made = Staged(tmp_path, stages)
        report = made.run()
    assert len(report["done"]) == 4
    assert report["other_code"] == [f"{PLAIN}:exactness", f"{ADASERVE}:exactness", f"{ADASERVE}:speed"]


def test_a_reference_that_others_were_compared_with_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([[Answer((1,), (1.0,))], ServerError("gone"), [Answer((2,), (0.5,))]])

    def generate(*_: Any, **__: Any) -> list[Answer]:
        if isinstance(made := next(given), ServerError):
            raise made
        return made

    monkeypatch.setattr(answers, "generate", generate)
    alone, server = Quiet(tmp_path), FakeServer()
    alone._prompts = [[1]]
    with pytest.raises(ServerError):
        alone._reference_outputs(server)  # type: ignore[arg-type]
    alone._reference_outputs(server)  # type: ignore[arg-type]
    assert alone.found.reference == [Answer((1,), (1.0,))] and alone.found.margin_noise == 1.5


def test_all_mixed_loads_follow_from_all_of_plain_decoding(tmp_path: Path) -> None:
    """Before it is done its largest batch is not known, and with it the capacity."""
    alone = Quiet(tmp_path)
    alone.found.tpot_ms = {PLAIN: {1: 2.0}}
    with pytest.raises(StageError, match="all of sglang:speed"):
        alone._mixed(FakeServer(), OWN[0])  # type: ignore[arg-type]


def test_the_code_is_what_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from adaserve import patches
    from adaserve.bench.gpu_check.findings import code_digest

    before = code_digest()
    assert before == code_digest()
    (tmp_path / "hook.py").write_text("changed = True\n")
    monkeypatch.setattr(patches, "__path__", [str(tmp_path)])
    assert code_digest() != before


def test_an_interrupted_stage_goes_on_where_it_was(
    tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is there for minutes measures no batch size, policy or load twice."""
    asked: list[Any] = []
    ends: list[int] = []  # how many measurements there are when the time is up

    def once(what: Any) -> float:
        if len(asked) == ends[-1]:
            raise KeyboardInterrupt
        asked.append(what)
        return float(len(asked))

    def generate(_: str, __: Any, tokens: int, **___: Any) -> list[Answer]:
        if tokens > 1:
            once("outputs")
        return []

    def mixed(_: Any, folder: Path, tokens_per_s: float, __: float, baseline_ms: float, *___: Any) -> Any:
        assert (tokens_per_s, baseline_ms) in ((2000.0, 1.0), (3600.0, 1.0)), "by plain decoding alone"
        return {"token_goodput": once(folder.parent.name)}

    monkeypatch.setattr(answers, "pace", lambda _url, prompts, *_: Pace(once(len(prompts))))
    monkeypatch.setattr(answers, "generate", generate)
    monkeypatch.setattr("adaserve.bench.gpu_check.check.run_mixed", mixed)
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [[1]])
    monkeypatch.setattr(FakeServer, "set_policy", lambda *_: None, raising=False)
    monkeypatch.setattr(FakeServer, "drain", lambda *_: None, raising=False)
    plan = CheckPlan(batches=(4, 8), rounds=1, loads=(0.5, 0.9))
    only = [f"{PLAIN}:speed", f"{ADASERVE}:exactness", f"{OWN[0]}:mixed"]

    def run() -> Check:
        made = Quiet(tmp_path, plan, only=only)
        made.run()
        return made

    monkeypatch.setattr("adaserve.bench.gpu_check.check.resume", _with_reference(resume))
    for end in (1, 3, 7):
        ends.append(end)
        with pytest.raises(KeyboardInterrupt):
            run()
    ends.append(99)
    found = run().found
    assert asked == [4, 8, *["outputs"] * 4, "mixed-0.9", "mixed-0.5"], "the load that is judged first"
    assert found.tpot_ms[PLAIN] == {4: 1.0, 8: 2.0} and set(found.mixed) == {"0.5", "0.9"}
    assert list(found.exact) == ["priced", "adaserve", "chain-4", "none"] and len(found.done) == 3


def _with_reference(resumed: Any) -> Any:
    """As if the plain server's outputs had been there from the start."""

    def resume_with(*words: Any) -> Findings:
        found: Findings = resumed(*words)
        found.reference = [Answer((1,))]
        return found

    return resume_with


def test_only_its_own_folder_is_gone_on_with(tmp_path: Path, started: list[FakeServer]) -> None:
    """Also where it was interrupted before anything was measured."""
    other = tmp_path / "sweep"
    other.mkdir()
    (other / "summary.json").write_text("{}")
    with pytest.raises(ServerError, match="results are not overwritten"):
        check(other, {f"{PLAIN}:first": lambda _: None})
    assert [path.name for path in other.iterdir()] == ["summary.json"] and not started

    def interrupted(_: FakeServer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(tmp_path / "own", {f"{PLAIN}:first": interrupted})
    (tmp_path / "own" / "sglang.log").touch()
    assert check(tmp_path / "own", {f"{PLAIN}:first": lambda _: None})["done"] == [f"{PLAIN}:first"]


def test_a_stage_that_hangs_is_ended(tmp_path: Path, started: list[FakeServer]) -> None:
    """Its server is stopped, which ends what its clients wait for; the next stage gets a new one."""

    def hangs(server: FakeServer) -> None:
        assert server.gone.wait(30)
        raise ConnectionError

    stages = {f"{PLAIN}:hangs": hangs, f"{PLAIN}:next": lambda _: None}
    report = check(tmp_path, stages, limit_s=0.2)
    assert report["failed"] == {f"{PLAIN}:hangs": "took longer than 0 s"}
    assert report["done"] == [f"{PLAIN}:next"] and len(started) == 2


def test_one_stage_alone(tmp_path: Path, started: list[FakeServer]) -> None:
    runs: list[str] = []
    stages = {f"{kind}:{n}": (lambda _, k=kind, n=n: runs.append(f"{k}:{n}"))
              for kind in (PLAIN, ADASERVE) for n in ("exactness", "speed")}  # fmt: skip
    check(tmp_path, stages, only=[f"{PLAIN}:speed", ADASERVE])
    assert runs == [f"{PLAIN}:speed", f"{ADASERVE}:exactness", f"{ADASERVE}:speed"]
    with pytest.raises(StageError, match="known are sglang:exactness"):
        check(tmp_path, stages, only=["sglang:sped"])


def test_what_was_asked_for_and_not_done(tmp_path: Path, started: list[FakeServer]) -> None:
    """A dry run does without the servers that need a GPU."""

    def fails(_: Any) -> None:
        raise ValueError("no")

    stages = {f"{PLAIN}:speed": fails, f"{PLAIN}:exactness": lambda _: None}
    made = Staged(tmp_path, stages)
    made.run()
    assert made.undone == [f"{PLAIN}:speed"]
    for device, left in (("cpu", []), ("cuda", [f"{OWN[0]}:speed"])):
        asked = [f"{OWN[0]}:speed"]
        plain = Quiet(tmp_path, pair=Pair("t", "d", device), only=asked)
        assert plain.undone == left


def test_a_stage_says_what_it_needs(tmp_path: Path) -> None:
    alone = Quiet(tmp_path)
    server: Any = FakeServer()
    with pytest.raises(StageError, match="run sglang:exactness first"):
        alone._outputs(server, "priced")
    with pytest.raises(StageError, match="sglang:speed"):
        alone._mixed(server, OWN[0])


def test_a_mixed_load_asks_for_what_it_is_judged_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose own baseline differs must not aim at other milliseconds."""
    from adaserve.loadgen import protocol
    from adaserve.loadgen.schedule import build_schedule

    configs, processes = [], []

    def run_bench(config: Any, _: Path, count: int, *__: Any) -> dict[str, Any]:
        configs.append(config)
        processes.append(count)
        return {"by_class": {}, "invalid_reasons": [], "token_goodput": 1.0}

    monkeypatch.setattr("adaserve.bench.gpu_check.mixed.run_bench", run_bench)
    monkeypatch.setattr("adaserve.bench.gpu_check.mixed.refuse_what_ended_early", lambda _: None)
    server: Any = FakeServer()
    for cores in (2, 16):
        monkeypatch.setattr("adaserve.bench.gpu_check.mixed.usable_cores", lambda cores=cores: cores)
        run_mixed(server, tmp_path, 640.0, 2.0, 10.0, 0, Console(quiet=True))
    assert processes == [1, 8], "one process does not follow what a GPU writes"
    config = configs[0]
    requests = build_schedule(config).requests
    assert len({request.slo_class for request in requests}) == 3
    for request in requests:
        sent = protocol.slo_headers(config.server, request)
        assert sent["x-slo-class"] == request.slo_class
        assert sent["x-slo-tpot-ms"] == f"{request.tpot_ms:.6g}"


def test_what_a_trace_says(tmp_path: Path) -> None:
    """Overlapping kernels are busy once."""
    events = [{"cat": "kernel", "name": n, "ts": ts, "dur": dur}
              for n, ts, dur in [("a", 0, 10), ("b", 5, 10), ("a", 30, 10), ("c", 32, 2)]]  # fmt: skip
    trace = tmp_path / "x.trace.json.gz"
    other = [{"cat": "cpu_op", "name": "x", "ts": 0, "dur": 99}, {"cat": "kernel", "name": "mark"}]
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, *other]}).encode()))
    said = summary(trace, "kernel", steps=2)
    assert said["events"] == 4 and said["events_per_step"] == 2
    assert said["busy_share"] == pytest.approx(25 / 40)
    assert next(iter(said["longest_us"].items())) == ("a", {"calls": 2, "us": 20})
    with pytest.raises(ServerError, match="no events"):
        summary(trace, "gpu_memcpy", steps=2)


def test_a_wrong_output_is_no_tie() -> None:
    found = findings()
    found.exact["priced"] = {"requests": 1, "identical": 0, "ties": 0, "different": [{"prompt": 0}]}
    assert target(EXACT, found)[0] is False


def test_commands() -> None:
    flags = {}
    for kind in (ADASERVE, PLAIN, *OWN):
        given = ("--speculative-token-map=m.pt", "--x", "1")
        command = spec_of(Pair("target", "draft", "cuda", given), kind).command()
        flags[kind] = " ".join(command)
        assert "--model-path target" in flags[kind] and flags[kind].count("--x 1") == 1
    assert "--speculative-algorithm ADASERVE" in flags[ADASERVE]
    assert "speculative-algorithm" not in flags[PLAIN] and "draft" not in flags[PLAIN]
    assert "m.pt" in flags[ADASERVE] and not any("m.pt" in flags[kind] for kind in OWN)
    for kind, topk in zip(OWN, ("1", "2"), strict=True):
        assert "--speculative-algorithm STANDALONE" in flags[kind]
        assert "--speculative-draft-model-path draft" in flags[kind]
        assert f"--speculative-eagle-topk {topk}" in flags[kind]
        headed = spec_of(Pair("target", "head", "cuda", given, "eagle3"), kind).command()
        assert "EAGLE3" in headed and "STANDALONE" not in headed and given[0] in headed
    given = ("--adaserve-drafts", "self", "--adaserve-draft-window=64", "--x", "1")
    alone = spec_of(Pair("target", "draft", "cuda", given), ADASERVE)
    assert alone.draft is None and alone.config.has_self and alone.config.draft_window == 64
    assert alone.extra == given[-2:]


def test_few_requests_are_asked_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft guesses one text better than another, so one prompt says little; without a draft it does."""
    asked: list[tuple[str, list[list[int]]]] = []
    cached: list[list[list[int]]] = []
    policy = [OWN[0]]

    def generate(_: str, prompts: list[list[int]], tokens: int) -> list[Answer]:
        assert tokens == 1
        cached.append(prompts)
        return [Answer(())]

    def pace(_: str, prompts: list[list[int]], __: int) -> Pace:
        assert prompts in cached
        asked.append((policy[-1], prompts))
        return Pace(1.0, 2.0 + len(asked) % 2)

    monkeypatch.setattr(answers, "pace", pace)
    monkeypatch.setattr(answers, "generate", generate)
    monkeypatch.setattr(FakeServer, "set_policy", lambda _, name: policy.append(name), raising=False)
    made = Quiet(tmp_path, CheckPlan(batches=(1, 2, 8)))
    made._prompts = [[i] for i in range(64)]
    made._speed(FakeServer(), [OWN[0]])  # type: ignore[arg-type]
    assert [len(prompts) for _, prompts in asked] == [1] * 12 + [2] * 6 + [8] * 3
    assert len({prompts[0][0] for _, prompts in asked[:12]}) == 12
    assert made.found.accept_length == {OWN[0]: {1: 2.5, 2: 2.5, 8: 3.0}}
    assert len(cached) == 21

    theirs = [prompts for _, prompts in asked]
    asked.clear()
    cached.clear()
    made._speed(FakeServer(), ["priced", NONE], switch=True)  # type: ignore[arg-type]
    assert [prompts for name, prompts in asked if name == "priced"] == theirs, "the same text"
    assert [len(prompts) for name, prompts in asked if name == NONE] == [1] * 3 + [2] * 3 + [8] * 3
    assert [name for name, _ in asked[:6]] == ["priced", NONE] * 3, "in turns"
    assert len(cached) == 21, "prompts are cached once for both policies"


def test_plans() -> None:
    assert _plan(False, batches=None) == CheckPlan()
    dry = _plan(True, batches=(2, 3), tokens=None, rounds=5, mixed_s=0.0)
    assert dry.batches == (2, 3) and dry.rounds == 5 and dry.mixed_s == 0 and dry.tokens < CheckPlan().tokens
    for loads in ((), (0.5, 0.0)):
        with pytest.raises(ValueError, match="loads should be numbers above 0"):
            _plan(True, loads=loads)


@pytest.mark.parametrize("length", [("--context-length", "8192"), ("--context-length=8192",)])
def test_a_context_length_that_was_given_is_kept(length: tuple[str, ...]) -> None:
    """Of two that SGLang reads, the last would count."""
    assert _common(CheckPlan(batches=(1, 70)), length) == ("--max-running-requests", "70", *length)
    assert _common(CheckPlan(), ())[2:] == ("--context-length", "4096")


def test_a_pair_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 20 GB are written, and four servers end one after the other."""
    monkeypatch.setattr("adaserve.bench.gpu_check.facts.gpu", lambda: {"memory_gib": 23.6})
    with pytest.raises(ServerError, match=r"this GPU has 23\.6 GiB.* give --size small"):
        _costs(dry=False, size=None)
    assert _costs(dry=False, size="small")[1] == shapes.Shipped("draft")
    assert _costs(dry=True, size=None, kind="eagle3")[1] == shapes.Shipped("eagle3")
    monkeypatch.setattr("adaserve.bench.gpu_check.facts.gpu", lambda: {"memory_gib": 79.2})
    assert _costs(dry=False, size=None) == (shapes.LARGE_TARGET, shapes.LARGE_DRAFT)
    assert _costs(dry=False, size=None, kind="eagle3") == (shapes.LARGE_TARGET, shapes.LARGE_HEAD)


def test_a_stage_that_is_not_there_is_refused_before_the_pair_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("adaserve.server.on_cpu", lambda: True)
    monkeypatch.setattr(shapes, "widened_pair", lambda *_: pytest.fail("it is made"))
    done = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--only", "sglang:sped"])
    assert done.exit_code == 2 and "there is no stage 'sglang:sped'" in done.stderr


def test_the_large_pair_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where one process makes it, and another one needs it: it takes 20 GB and minutes."""
    made: list[str] = []

    def ensure(model: str, width: object) -> Path:
        if model not in made:
            time.sleep(0.1)
            made.append(model)
        return tmp_path / model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "ensure_widened", ensure)
    pair = shapes.LARGE_TARGET, shapes.LARGE_DRAFT
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: shapes.widened_pair(*pair), range(2)))
    assert found[0] == found[1] and made == ["target", "draft"]


def test_a_small_pair_does_not_wait_for_a_large_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is what stages go on with where making the large one takes too long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_made, found = threading.Event(), []

    def ensure(_: str, width: Width) -> Path:
        if width.hidden:
            assert is_made.wait(10)
        return tmp_path

    def small() -> None:
        found.append(shapes.widened_pair(shapes.Cost("100M", 0), shapes.Shipped()))
        is_made.set()

    monkeypatch.setattr(shapes, "ensure_widened", ensure)
    monkeypatch.setattr(shapes, "shipped_draft", lambda _: tmp_path)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(shapes.widened_pair, shapes.LARGE_TARGET, shapes.LARGE_DRAFT)
        pool.submit(small).result()
        assert large.result() == (tmp_path, tmp_path) and found == [(tmp_path, tmp_path)]


def test_a_server_whose_scheduler_died_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang would wait a minute for a core dump, and each client of a stage with it."""
    from sglang.srt.environ import envs

    given: dict[str, str] = {}

    def running(*words: Any) -> Any:
        given.update(words[3])
        return nullcontext(FakeServer())

    monkeypatch.setattr("adaserve.bench.gpu_check.systems.running_server", running)
    with serving(Pair("t", "d", "cuda"), PLAIN, tmp_path / "log", Console(quiet=True), 1.0):
        pass
    names = ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH")
    assert all(hasattr(envs, name) and given[name] == "0" for name in names)


def test_a_server_that_hangs_while_it_starts_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no longer than a stage may, and the next server is tried."""
    limits = []

    def serving(_: Pair, kind: str, __: Path, ___: Console, limit_s: float) -> Any:
        limits.append(limit_s)
        if kind == PLAIN:
            raise ServerError(f"the server did not answer within {limit_s:.0f} s; see the log")
        return nullcontext(FakeServer())

    monkeypatch.setattr("adaserve.bench.gpu_check.check.serving", serving)
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [])
    report = check(tmp_path, SERVERS_STAGES, limit_s=7.0)
    assert limits == [7.0, 7.0] and "within 7 s" in report["skipped"][PLAIN]
    assert report["done"] == [f"{ADASERVE}:exactness", f"{ADASERVE}:speed"]


def test_making_the_large_pair_needs_nothing_of_the_bundle() -> None:
    """So that it is made while the bundle is on its way."""
    root = Path(__file__).resolve().parents[2]
    lines = (root / "scripts" / "gpu_bundle.txt").read_text().splitlines()
    bundle = {re.split("==|#", line)[0].strip() for line in lines} - {"rich"}
    known = metadata.packages_distributions().items()
    carried = [name for name, of in known if bundle & {re.sub("[-_.]+", "-", d).lower() for d in of}]
    assert {"pydantic", "sglang", "typer"} <= {*carried}
    code = f"import sys; sys.modules |= dict.fromkeys({carried!r}); import adaserve.bench.gpu_check.shapes"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_compilers_end_with_the_kernel_that_took_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the cores from the servers that are measured next."""
    from adaserve.bench.gpu_check import kernels

    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >>{tmp_path}/compilers\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    results = kernels.run_all("cpu", 1.0)
    assert {result["error"] for result in results.values()} == {"took longer than 1 s"}
    compilers = list(map(int, (tmp_path / "compilers").read_text().split()))
    assert len(compilers) == len(results) > 1 and not any(map(psutil.pid_exists, compilers))


def test_a_kernel_that_was_right_may_fail_while_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries of CUDA do; one that has said nothing has failed before."""
    from adaserve.bench.gpu_check import kernels

    ends = tmp_path / "python"
    ends.write_text("""#!/bin/sh
case "$*" in *moves*) echo "killed" >&2; exit 139;; *) echo '{"right": true}'; exit 139;; esac
""")
    ends.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(ends))
    results = kernels.run_all("cpu", 20.0)
    assert results.pop("moves") == {"right": False, "error": "killed"}
    assert all(result == {"right": True} for result in results.values())


def test_not_a_number_is_a_difference() -> None:
    """Of a graph's output, say, where the eager one was right."""
    from adaserve.bench.gpu_check.kernels import _worst

    right, wrong = torch.zeros(2), torch.tensor([0.0, float("nan")])
    assert _worst((right, right), (right, right + 1)) == 1.0
    assert not _worst((right, right), (right, wrong)) < 1.0

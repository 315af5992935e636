"""The GPU check's judgement, on made-up measurements; the whole of it runs in ``--device cpu``."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaserve.bench.gpu_check import answers
from adaserve.bench.gpu_check.answers import Answer
from adaserve.bench.gpu_check.check import Check, CheckPlan, Findings, Sections, targets
from adaserve.bench.gpu_check.cli import _plan
from adaserve.bench.gpu_check.figures import draw
from adaserve.bench.gpu_check.servers import ADASERVE, PLAIN, STANDALONE, Pair, spec_of
from adaserve.server import ServerError


@pytest.fixture
def url() -> Iterator[str]:
    """A server that counts on from the last prompt token, and is sure of odd tokens only."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            count, last = body["sampling_params"]["max_new_tokens"], body["input_ids"][-1]
            ids = [last + 1 + i for i in range(count)]
            meta: dict[str, Any] = {}
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
    assert all(a.seconds > 0 for a in given)
    assert isinstance(answers.tpot_ms(url, [[5]] * 4, 8), float)


def test_outputs_are_compared_with_mercy_for_ties(tmp_path: Path) -> None:
    check = Check(Pair("t", "d", "cpu"), CheckPlan(tie_margin=0.1), tmp_path, Console(quiet=True))
    sure = (1.0, 1.0, 1.0)
    check.found.reference = [Answer((1, 2, 3), 1.0, sure)] * 2 + [
        Answer((1, 2, 3), 1.0, (1.0, 0.05, 1.0))
    ] * 2
    found = check._compare([Answer(ids, 1.0) for ids in [(1, 2, 3), (1, 2, 9), (1, 7, 7), (9, 2, 3)]])
    assert (found["requests"], found["identical"], found["ties"]) == (4, 1, 1)
    assert found["different"] == [
        {"prompt": 1, "token": 2, "margin": 1.0}, {"prompt": 3, "token": 0, "margin": 1.0},
    ]  # fmt: skip


def findings() -> Findings:
    clean = {"requests": 2, "identical": 2, "ties": 0, "different": []}
    spent = {"decode_s": 1.0, "target_s": 0.7, "draft_s": 0.28}
    mixed = {"0.5": {"priced": {"token_goodput": 5.0}},
             "1.3": {"priced": {"token_goodput": 90.0}, "adaserve": {"token_goodput": 110.0},
                     STANDALONE: {"token_goodput": 100.0}}}  # fmt: skip
    return Findings(
        exact={"adaserve": clean, f"{PLAIN}, one by one": {**clean, "different": [{}]}},
        tpot_ms={PLAIN: {1: 10.0, 32: 12.0}, "adaserve": {1: 4.0, 32: 9.0}},
        details={"adaserve": {32: spent}, "verification": {"ratio": 1.2}},
        mixed=mixed,
    )


def test_targets() -> None:
    met = {t["target"]: (t["value"], t["met"]) for t in targets(findings())}
    assert list(met.values()) == [
        (0, True),
        (2.5, True),
        (1.2, False),
        (pytest.approx(0.02), True),
        (1.1, True),
    ]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert [t["met"] for t in targets(Findings())] == [None] * 5


def test_a_dry_run_claims_no_speed() -> None:
    rows = targets(findings(), dry=True)
    assert [t["met"] for t in rows] == [True, None, None, None, None]
    assert [t["value"] for t in rows] == [t["value"] for t in targets(findings())]


def test_speed_is_asked_of_the_default_policy_first() -> None:
    found = findings()
    found.details["priced"] = {32: {"decode_s": 1.0, "target_s": 0.6, "draft_s": 0.3}}
    found.tpot_ms["priced"] = {1: 3.0}
    values = [t["value"] for t in targets(found)]
    assert values[1] == pytest.approx(3.3333) and values[3] == pytest.approx(0.1)


def test_an_interrupted_check_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections that were done are not run again, their results come back, and another plan is refused."""
    runs: list[str] = []

    class Broken(Check):
        broken = True

        def _plain(self) -> Sections:
            def speed(_: Any) -> None:
                runs.append("speed")
                if self.broken:
                    raise ServerError("the machine was taken away")
                self.found.tpot_ms[PLAIN] = {1: 2.0, 8: 3.0}

            def exactness(_: Any) -> None:
                runs.append("exactness")
                self.found.reference = [Answer((1, 2), 0.5, (0.25, 1.0))]

            return {"exactness": exactness, "speed": speed}

        def _adaserve(self) -> Sections:
            return {}

        _standalone = _adaserve

    monkeypatch.setattr("adaserve.bench.gpu_check.check.serving", lambda *_: nullcontext())
    monkeypatch.setattr("adaserve.bench.gpu_check.check._prompts", lambda *_: [])
    console = Console(quiet=True)
    with pytest.raises(ServerError, match="taken away"):
        Broken(Pair("t", "d", "cpu"), CheckPlan(), tmp_path, console).run()
    assert json.loads((tmp_path / "gpu-check.json").read_text())["done"] == [f"{PLAIN}: exactness"]
    Broken.broken = False
    for again in range(2):
        check = Broken(Pair("t", "d", "cpu"), CheckPlan(), tmp_path, console)
        report = check.run()
        assert check.found.reference == [Answer((1, 2), 0.5, (0.25, 1.0))]
        assert check.found.tpot_ms == {PLAIN: {1: 2.0, 8: 3.0}}, f"run {again}"
    assert runs == ["exactness", "speed", "speed"] and len(report["done"]) == 2 and report["dry_run"]
    with pytest.raises(ServerError, match="another --out"):
        Broken(Pair("t", "d", "cpu"), CheckPlan(tokens=5), tmp_path, console).run()


def test_a_wrong_output_is_no_tie() -> None:
    found = findings()
    found.exact["priced"] = {"requests": 1, "identical": 0, "ties": 0, "different": [{"prompt": 0}]}
    assert targets(found)[0]["met"] is False


def test_figures(tmp_path: Path) -> None:
    found = findings()
    report = json.loads(json.dumps({"tpot_ms": found.tpot_ms, "mixed": found.mixed}))
    files = draw(report, tmp_path)
    assert [f.name for f in files] == ["tpot.png", "goodput.png"]
    assert all(f.stat().st_size > 5000 for f in files)
    assert [f.name for f in draw({**report, "mixed": {}}, tmp_path)] == ["tpot.png"]


def test_commands() -> None:
    flags = {}
    for kind in (ADASERVE, PLAIN, STANDALONE):
        command = spec_of(Pair("target", "draft", "cuda", ("--x", "1")), kind).command()
        flags[kind] = " ".join(command)
        assert "--model-path target" in flags[kind] and flags[kind].count("--x 1") == 1
    assert "--speculative-algorithm ADASERVE" in flags[ADASERVE]
    assert "speculative" not in flags[PLAIN]
    assert "--speculative-algorithm STANDALONE" in flags[STANDALONE]
    assert "--speculative-draft-model-path draft" in flags[STANDALONE]


def test_plans() -> None:
    assert _plan(False, batches=None) == CheckPlan()
    dry = _plan(True, batches=(2, 3), tokens=None, rounds=5, mixed_s=0.0)
    assert dry.batches == (2, 3) and dry.rounds == 5 and dry.mixed_s == 0 and dry.tokens < CheckPlan().tokens

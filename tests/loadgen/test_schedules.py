"""Schedules: pure, seeded, faithful to what was asked."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve.loadgen import options
from adaserve.loadgen.arrivals import Arrivals, arrival_times
from adaserve.loadgen.config import (
    BenchConfig,
    ClassLoad,
    Endpoint,
    Length,
    TraceSpec,
    from_mapping,
    load_config,
)
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.prompts import load_prompts
from adaserve.loadgen.protocol import body
from adaserve.loadgen.results import COMMAND_VARIABLE, command_line
from adaserve.loadgen.schedule import build_schedule
from adaserve.slo.classes import SLO
from adaserve.slo.events import FinishedRequest
from adaserve.slo.request_log import RequestLog
from adaserve.slo.trace import TraceRow, write_jsonl


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kind", ["poisson", "constant", "ramp", "peak"])
def test_rates(kind: str) -> None:
    times = arrival_times(Arrivals(kind=kind, rps=5.0, to_rps=5.0), 1000.0, rng())
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < 1000


@pytest.mark.parametrize(("rps", "to_rps", "halves"), [(0.0, 10.0, (1250, 3750)), (10.0, 0.0, (3750, 1250))])
def test_a_ramp_goes_from_one_rate_to_the_other(rps: float, to_rps: float, halves: tuple[int, int]) -> None:
    times = arrival_times(Arrivals(kind="ramp", rps=rps, to_rps=to_rps), 1000.0, rng())
    early = np.count_nonzero(times < 500)
    assert (early, len(times) - early) == pytest.approx(halves, rel=0.1)


def test_gamma_is_bursty() -> None:
    # The mean of few, very uneven gaps varies: many are needed to see the rate.
    gaps = np.diff(arrival_times(Arrivals(kind="gamma", rps=50.0, cv=3.0), 2000.0, rng()))
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)


def test_burstiness_means_what_it_does_in_vllm() -> None:
    """There gaps are ``gamma(shape=burstiness, scale=mean / burstiness)``: below 1 is burstier."""
    for burstiness in (0.25, 4.0):
        given = options.arrivals(50.0, burstiness)
        gaps = np.diff(arrival_times(Arrivals(**given), 2000.0, rng()))
        same = rng(2).gamma(burstiness, 0.02 / burstiness, 100_000)
        assert gaps.mean() == pytest.approx(same.mean(), rel=0.05)
        assert gaps.std() == pytest.approx(same.std(), rel=0.05)
    assert options.arrivals(50.0, None) == {"rps": 50.0}, "without it, the kind stays as it is"


def test_peak_is_where_it_was_asked() -> None:
    times = arrival_times(Arrivals(kind="peak", rps=1.0, to_rps=20.0, at=0.25, width=0.05), 1000.0, rng())
    counts, edges = np.histogram(times, 20, (0, 1000))
    assert edges[counts.argmax()] in (200.0, 250.0)
    assert counts[-5:].mean() < 0.15 * counts.max()


def test_same_seed_same_schedule() -> None:
    config = BenchConfig(baseline_ms=30.0)
    one, two = build_schedule(config), build_schedule(config)
    other = build_schedule(BenchConfig(baseline_ms=30.0, seed=1))
    assert one.requests == two.requests
    assert build_schedule(config.changed(max_requests=5)).requests == one.requests[:5]
    assert one.trace_sha256 == two.trace_sha256 != other.trace_sha256


@pytest.mark.parametrize("arrivals", [{}, {"kind": "gamma", "cv": 5.0}, {"kind": "constant", "rps": 0.1}])
@pytest.mark.parametrize("count", [1, 300])
def test_a_number_of_prompts_takes_as_long_as_it_takes(arrivals: dict[str, Any], count: int) -> None:
    limits = {"duration_s": None, "warmup_s": None, "max_requests": None, "num_prompts": count}
    for seed in range(5):
        config = BenchConfig(baseline_ms=30.0, seed=seed, arrivals=Arrivals(**arrivals))
        assert len(build_schedule(options.with_count(config, limits))) == count


def test_every_process_of_arrivals_counts_towards_a_number_of_prompts() -> None:
    limits = {"duration_s": None, "warmup_s": None, "max_requests": None, "num_prompts": 50}
    own = {"coding": {"arrivals": {"rps": 0.001}}, "chat": {"arrivals": {"rps": 5.0}}}
    config = from_mapping({"baseline_ms": 30, "classes": own, "arrivals": {"kind": "ramp", "to_rps": 3}})
    planned = options.with_count(config, limits)
    assert len(build_schedule(planned)) == 50
    assert planned.duration_s < 100, "the rare class need not send them all"


def test_a_key_replaces_the_one_that_a_file_states_in_any_case() -> None:
    """Both would be sent, and a server reads the first of two headers with one name."""
    for name in ("authorization", "Authorization"):
        config = BenchConfig(server=Endpoint(headers={name: "Bearer old", "x-team": "a"}))
        headers = options.with_server(config, {}, "new").server.headers
        assert headers == {"x-team": "a", "Authorization": "Bearer new"}


def test_another_trace_is_read_and_fitted_as_the_file_says() -> None:
    """Refusals of a trace name settings under ``trace:``: they must reach the --trace that was refused."""
    stated = {"sort": True, "slo_from": "trace", "max_output_tokens": 9, "stated_max_tokens": 512}
    config = from_mapping({"trace": {"path": "a", "start_s": 7, **stated}})
    told = options.with_load(config, "b", {"start_s": None, "target_rps": 2.0, "time_scale": None}, {})
    assert (
        told.trace == from_mapping({"trace": {"path": "b", "start_s": 7, "target_rps": 2.0, **stated}}).trace
    )


def test_an_slo_on_the_command_line_replaces_what_it_states() -> None:
    config = BenchConfig(baseline_ms=20.0)
    objectives = {
        "chat=50": (50.0, None, None),
        "chat=50ms,ttft:2000": (50.0, None, 2000.0),
        "chat=tpot:1.5x,ttft:2000ms": (None, 1.5, 2000.0),
        "chat=ttft:2000": (config.classes["chat"].tpot_ms, config.classes["chat"].x_baseline, 2000.0),
    }
    for text, stated in objectives.items():
        chat = options.with_classes(config, None, [text]).classes["chat"]
        assert (chat.tpot_ms, chat.x_baseline, chat.ttft_ms) == stated, text
    both = options.with_classes(config, None, ["chat=50", "chat=ttft:2000"])
    assert both == options.with_classes(config, None, ["chat=50,ttft:2000"])
    assert {r.ttft_ms for r in build_schedule(both).requests if r.slo_class == "chat"} == {2000.0}


def test_slo_follows_the_baseline() -> None:
    slos = {r.slo_class: r.tpot_ms for r in build_schedule(BenchConfig(baseline_ms=20.0)).requests}
    assert slos == pytest.approx({"coding": 24.0, "chat": 100 / 3, "summarization": 100.0})


def test_classes_may_peak_in_turn() -> None:
    config = from_mapping(
        {
            "baseline_ms": 30,
            "duration_s": 600,
            "classes": {
                "coding": {"arrivals": {"kind": "peak", "rps": 0.1, "to_rps": 4, "at": 0.2, "width": 0.05}},
                "chat": {"arrivals": {"kind": "peak", "rps": 0.1, "to_rps": 4, "at": 0.8, "width": 0.05}},
            },
        }
    )
    at: dict[str, list[float]] = {"coding": [], "chat": []}
    for r in build_schedule(config).requests:
        at[r.slo_class].append(r.at_s)
    assert np.median(at["coding"]) == pytest.approx(120, abs=40)
    assert np.median(at["chat"]) == pytest.approx(480, abs=40)


@pytest.mark.parametrize(
    ("pace", "gap_s"), [({}, 1.0), ({"target_rps": 2.0}, 0.5), ({"time_scale": 0.25}, 0.25)]
)
def test_trace_replay_keeps_times_lengths_and_prompts(
    tmp_path: Path, pace: dict[str, float], gap_s: float
) -> None:
    rows = [TraceRow(float(t), 10 + t, 5 + t, "chat", prompt_id=f"p{t % 3}") for t in range(60)]
    path = tmp_path / "t.jsonl"
    write_jsonl(rows, path)
    config = BenchConfig(trace=TraceSpec(path=str(path), start_s=10, **pace), duration_s=10, baseline_ms=30)
    got, n = build_schedule(config).requests, int(10 / gap_s)
    assert [r.at_s for r in got] == pytest.approx([gap_s * k for k in range(n)])
    assert [r.max_tokens for r in got] == [15 + k for k in range(n)]
    prompts: dict[int, set[str]] = {}
    for k, r in enumerate(got):
        prompts.setdefault((k + 10) % 3, set()).add(r.prompt[:20])
    assert all(len(texts) == 1 for texts in prompts.values())


def test_what_a_server_has_recorded_is_replayed_from_its_first_request_on(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "t.jsonl")
    now_s = time.perf_counter()
    for tokens, ago_s in ((5, 20.0), (6, 30.0), (7, 10.0)):  # in the order in which they ended
        log.add(FinishedRequest(SLO("chat", 0.05), 0.1, 0.04, tokens), now_s - ago_s, 9)
    config = BenchConfig(trace=TraceSpec(path=str(tmp_path / "t.jsonl")), baseline_ms=30)
    got = build_schedule(config).requests
    assert [r.max_tokens for r in got] == [6, 5, 7]
    assert [r.at_s for r in got] == pytest.approx([0.0, 10.0, 20.0], abs=0.1)


def test_a_bound_is_stated_in_place_of_the_length(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl([TraceRow(0.0, 5, 7, "chat"), TraceRow(1.0, 5, 90, "chat")], path)
    spec = TraceSpec(path=str(path), stated_max_tokens=64)
    got = build_schedule(BenchConfig(trace=spec, baseline_ms=30)).requests
    assert [(r.max_tokens, r.answer_tokens) for r in got] == [(64, 7), (90, 90)]
    native, chat = (body(Endpoint(api=api), got[0], "") for api in ("generate", "chat"))
    assert native["sampling_params"]["max_new_tokens"] == chat["max_tokens"] == 64
    assert native["sampling_params"]["custom_params"] == chat["custom_params"] == {"answer_tokens": 7}
    exact = build_schedule(BenchConfig(trace=TraceSpec(path=str(path)), baseline_ms=30)).requests
    assert [(r.max_tokens, r.answer_tokens) for r in exact] == [(7, None), (90, None)]
    assert "custom_params" not in body(Endpoint(), exact[0], "")


def test_slo_from_classes_or_from_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(
        [
            TraceRow(0.0, 5, 5, "chat", slo_tpot_ms=70.0),
            TraceRow(1.0, 5, 5, "own", slo_tpot_ms=9.0),
            TraceRow(2.0, 5, 5, "default"),
            TraceRow(3.0, 5, 5, "late", slo_ttft_ms=900.0),
        ],
        path,
    )

    def slos(source: str) -> list[tuple[str, float | None]]:
        config = BenchConfig(trace=TraceSpec(path=str(path), slo_from=source), baseline_ms=30)
        return [(r.slo_class, r.tpot_ms and round(r.tpot_ms, 3)) for r in build_schedule(config).requests]

    assert slos("classes") == [("chat", 50.0), ("own", 9.0), ("default", None), ("late", None)]
    assert slos("trace") == [("chat", 70.0), ("own", 9.0), ("default", None), ("late", None)]


def test_lengths_are_drawn_between_their_bounds() -> None:
    length = Length(median=20, sigma=1.0, low=10, high=30)
    drawn = ClassLoad(name="chat", tpot_ms=50, prompt_tokens=length, output_tokens=length)
    config = BenchConfig(classes={"chat": drawn}, arrivals=Arrivals(kind="poisson", rps=10.0), duration_s=30)
    lengths = [n for r in build_schedule(config).requests for n in (r.prompt_tokens, r.max_tokens)]
    assert (min(lengths), max(lengths)) == (10, 30) and np.median(lengths) == pytest.approx(20, abs=2)


def test_shards_cover_everything_and_keep_sessions_together() -> None:
    config = BenchConfig(
        classes={"chat": ClassLoad(name="chat", tpot_ms=50, turns=3)},
        arrivals=Arrivals(kind="poisson", rps=3.0),
        duration_s=30,
    )
    schedule = build_schedule(config)
    shards = [schedule.shard(k, 3) for k in range(3)]
    assert sorted(r.index for s in shards for r in s) == list(range(len(schedule)))
    homes: dict[str | None, set[int]] = {}
    for k, shard in enumerate(shards):
        for r in shard:
            homes.setdefault(r.session, set()).add(k)
    assert all(len(h) == 1 for h in homes.values()) and len(homes) > 30


def test_prompts_have_about_the_asked_length_and_come_from_the_category(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    lines = [{"category": "chat", "text": "chat word " * 300}, {"category": "coding", "text": "x = 1\n" * 20}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    store = load_prompts(path, {"chat": 5.0})
    text = store.get("chat", 100, "k")
    assert 450 <= len(text) <= 500 and set(text.split()) == {"chat", "word"}
    assert len(store.get("coding", 500, "k")) == pytest.approx(1750, rel=0.1)
    assert store.get("unknown", 10, "k")


def test_a_class_says_what_its_requests_are_like(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"category": "chat", "text": "chat word " * 300}, {"category": "coding", "text": "x = 1\n" * 20}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bot = ClassLoad(name="bot", tpot_ms=50, category="coding", temperature=0.5, priority=3)
    sent = build_schedule(BenchConfig(classes={"bot": bot}, prompts=str(path), duration_s=9)).requests
    assert {(r.temperature, r.priority, "x = 1" in r.prompt) for r in sent} == {(0.5, 3, True)}


def test_prompts_may_hold_whatever_json_allows(tmp_path: Path) -> None:
    path, text = tmp_path / "p.jsonl", "one\u2028two\x85three"
    line = json.dumps({"category": "chat", "text": text}, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\r\n\n")
    assert load_prompts(path).texts == {"chat": [text]}
    path.write_text(r'{"category": "chat", "text": "half a smile \ud83d"}')
    with pytest.raises(LoadgenError, match=r"p\.jsonl:1: text holds '\\ud83d', not a character of UTF-8"):
        load_prompts(path)


class Letters:
    """A tokenizer that begins texts as Llama's does, and reads such a token where a text spells it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = [0 if part == "<s>" else ord(part) for part in re.findall(r"<s>|.", text, re.DOTALL)]
        return [0, *found] if add_special_tokens else found

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(k) if k else "<s>" for k in token_ids)


@pytest.mark.parametrize("tokens", [2, 100, 1000])
def test_with_a_tokenizer_prompts_have_just_as_many_tokens_on_a_server(tokens: int) -> None:
    tokenizer = Letters()
    text = load_prompts(tokenizer=tokenizer).get("chat", tokens, "k")
    assert "<s>" not in text, "the server would read it twice"
    assert len(tokenizer.encode(text)) == tokens


def test_disconnects_are_a_share() -> None:
    one = ClassLoad(name="chat", tpot_ms=50, disconnect=0.3, output_tokens=Length(median=20))
    config = BenchConfig(classes={"chat": one}, arrivals=Arrivals(kind="constant", rps=10), duration_s=60)
    cut = Counter(r.disconnect_after is not None for r in build_schedule(config).requests)
    assert cut[True] / 600 == pytest.approx(0.3, abs=0.07)


def test_configuration_survives_saving(tmp_path: Path) -> None:
    config = from_mapping(
        {
            "server": {"url": "http://127.0.0.1:1", "api": "chat"},
            "classes": {
                "coding": {"tpot_ms": 40, "prompt_tokens": {"median": 50, "sigma": 0.2}},
                "x": {"share": 2},
            },
            "arrivals": {"kind": "gamma", "rps": 2, "cv": 2},
            "trace": "some.jsonl",
        }
    )
    config.save(tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == config
    assert config.classes["coding"].x_baseline is None


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--api-key", "k-1"], "--api-key '<redacted>'"),
        (["--api-key=k-1 k-2"], "'--api-key=<redacted>'"),
        (["--flags", "--admin-api-key k-1 --host h"], "--flags '--admin-api-key <redacted> --host h'"),
        (["--flags=--api-key=k-1"], "'--flags=--api-key=<redacted>'"),
        (["--flags", "--api-k k-1 --ssl-keyfile f"], "--flags '--api-k <redacted> --ssl-keyfile f'"),
        (["--api", "chat", "--api-key", "--api-key"], "--api chat --api-key '<redacted>'"),
        (["--api=chat", "--ssl-keyfile=f"], "--api=chat --ssl-keyfile=f"),
    ],
)
def test_a_recorded_command_shows_no_keys(monkeypatch, typed: list[str], told: str) -> None:
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["adaserve", *typed])
    assert command_line() == f"adaserve {told}"

"""`adaserve bench latency` at long contexts: what is sent, what it needs room for, what is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from adaserve.bench import latency
from adaserve.bench.client import Ask
from adaserve.bench.latency import MARGIN, LatencyPlan, Sample, _long, run_latency, summarize
from adaserve.server import ServerSpec


def sample(context: int, policy: str, turn: int, tpot_ms: float, same: float = 1.0) -> Sample:
    return Sample(
        "model", policy, batch=1, temperature=0.8, context=context, round=turn, tpot_ms=tpot_ms,
        accept_length=2.0, distinct_8grams=1.0, iteration_ms=9.0, target_ms=6.0, draft_ms=2.0,
        python_share=0.1, loop_ms=10.0, other_share=0.2, same=same,
    )  # fmt: skip


def test_long_prompts_are_beginnings_of_longer_ones() -> None:
    plan = LatencyPlan(batches=(3,))
    short, long = (_long(plan, plan.tokens + MARGIN + tokens) for tokens in (100, 900))
    assert len({tuple(ask.prompt) for ask in long}) == 3
    for a, b in zip(short, long, strict=True):
        assert len(a.prompt) == 100 and list(a.prompt) == list(b.prompt[:100])


def test_requests_fit_into_their_context_and_pool() -> None:
    plan = LatencyPlan(batches=(1, 16), tokens=64, contexts=(1024, 8192))
    flags = dict(zip(plan.flags[::2], map(int, plan.flags[1::2]), strict=True))
    assert flags["--context-length"] == 8192
    assert flags["--max-total-tokens"] >= 16 * (8192 + 64)
    assert all(len(ask.prompt) + plan.tokens < 1024 for ask in _long(plan, 1024))
    assert LatencyPlan().flags == ()


def test_rounds_are_paired_within_a_context() -> None:
    plan = LatencyPlan(policies=("priced@auto",), batches=(1,), temperatures=(0.8,), contexts=(1024, 8192))
    samples = [
        sample(context, policy, turn, tpot_ms, same)
        for context, plain in ((1024, 20.0), (8192, 60.0))
        for turn, busy in enumerate((1.0, 3.0, 1.0))
        for policy, tpot_ms, same in (
            ("none", plain * busy, 1.0),
            ("priced@auto", plain * busy / 2, 0.0 if turn else 1.0),
        )
    ]
    rows = {(r["context"], r["policy"]): r for r in summarize(samples, plan)}
    assert [rows[context, "priced@auto"]["speedup"] for context in (1024, 8192)] == [2.0, 2.0]
    assert rows[8192, "none"]["tpot_ms"] == 60.0
    assert rows[1024, "priced@auto"]["same"] == 1 / 3, "one round of three"


def test_rounds_that_were_played_are_kept_whatever_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played(*_: Any) -> Iterator[list[Sample]]:
        yield [sample(0, policy, 0, tpot_ms) for policy, tpot_ms in (("none", 20.0), ("priced", 10.0))]
        raise KeyboardInterrupt

    server = SimpleNamespace(report=lambda: {"latency": {"form": "x"}})
    monkeypatch.setattr(latency, "running_server", lambda *_: nullcontext(server))
    monkeypatch.setattr(latency, "run", played)
    plan = LatencyPlan(policies=("priced",), batches=(1, 4), temperatures=(0.8,))
    with pytest.raises(KeyboardInterrupt):
        run_latency({"model": ServerSpec()}, plan, tmp_path / "latency.json", Console(quiet=True))
    record = json.loads((tmp_path / "latency.json").read_text())
    assert [(r["policy"], r["batch"], r["speedup"]) for r in record["summary"]] == [
        ("none", 1, 1.0), ("priced", 1, 2.0)
    ]  # fmt: skip
    assert record["latency_models"] == {"model": {"form": "x"}}


def test_nothing_is_always_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes first after the prefills may be slower for that, so plain decoding must not always do so."""
    order: list[tuple[int, str, str]] = []

    def measured(
        kind: str, _: Any, policy: str, asks: Any, turn: int, context: int
    ) -> tuple[Sample, list[str]]:
        order.append((turn, kind, policy))
        return sample(context, policy, turn, 10.0), ["text" if policy == "none" or turn == 0 else "other"]

    monkeypatch.setattr(latency, "_asks", lambda *_: [Ask("p", 8)])
    monkeypatch.setattr(latency, "_prefill", lambda *_, **__: None)
    monkeypatch.setattr(latency, "_measure", measured)
    plan = LatencyPlan(policies=("priced",), batches=(1,), temperatures=(0.0,), rounds=2)
    servers: Any = {"model": None, "eagle3": None}
    told: list[str] = []
    samples = [s for played in latency.run(servers, plan, told.append) for s in played]
    assert len(told) == plan.steps(2), "what the bar counts"
    assert order[:4] == [(0, k, p) for k in ("model", "eagle3") for p in ("none", "priced")]
    assert order[4:] == [(1, k, p) for k in ("eagle3", "model") for p in ("priced", "none")]
    assert {(s.round, s.policy): s.same for s in samples} == {
        (0, "none"): 1.0, (0, "priced"): 1.0, (1, "none"): 1.0, (1, "priced"): 0.0,
    }  # fmt: skip


def test_answers_are_all_the_same_only_where_none_differs() -> None:
    """One answer of 256 is a text that a draft has changed, not a rounding error."""
    plan = LatencyPlan(policies=("priced",), batches=(1,), temperatures=(0.0,))
    samples = [
        replace(sample(0, policy, 0, 10.0, same), temperature=0.0)
        for policy, same in (("none", 1.0), ("priced", 255 / 256))
    ]
    *_, cells = latency._table(summarize(samples, plan)).columns
    assert list(cells.cells) == ["100%", "99.6%"]

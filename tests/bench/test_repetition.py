"""Text that repeats itself, to measure retrieval drafts with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaserve.bench.demo import _repetitive
from adaserve.bench.repetition import KINDS, OF_CLASS, SCHEMA, repetitive
from adaserve.loadgen.config import BenchConfig, Endpoint, default_classes
from adaserve.loadgen.schedule import build_schedule


def test_the_same_seed_gives_the_same_requests_in_turn_of_kinds() -> None:
    asks = repetitive(tuple(KINDS), 12, seed=3)
    assert asks == repetitive(tuple(KINDS), 12, seed=3) != repetitive(tuple(KINDS), 12, seed=4)
    assert [ask.json_schema is not None for ask in asks] == [kind == "json" for kind in list(KINDS) * 3]
    assert len({ask.prompt for ask in asks}) == 12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "json"])
def test_a_prompt_ends_with_words_that_it_has_said_before(kind: str) -> None:
    for ask in repetitive([kind], 40):
        words = str(ask.prompt).split()
        end = words[-1:] if kind == "templates" else words[-3:]
        earlier = [words[i : i + len(end)] for i in range(len(words) - len(end))]
        assert end in earlier or kind == "edits", ask.prompt


def test_a_schema_ends_an_answer_before_its_tokens_do() -> None:
    ask, plain = repetitive(["json", "turns"], 2)
    assert json.loads(ask.body()["sampling_params"]["json_schema"]) == SCHEMA
    assert not ask.body()["sampling_params"]["ignore_eos"] and plain.body()["sampling_params"]["ignore_eos"]


def test_the_demo_keeps_arrivals_and_lengths_and_changes_what_is_asked(tmp_path: Path) -> None:
    config = BenchConfig(
        server=Endpoint(url="http://127.0.0.1:1"), classes=default_classes(), duration_s=30, baseline_ms=20
    )
    plain = build_schedule(config).requests
    changed = build_schedule(_repetitive(config, tmp_path / "repetition.jsonl")).requests
    assert len(changed) == len(plain) > 10
    for a, b in zip(changed, plain, strict=True):
        assert (a.slo_class, a.max_tokens) == (b.slo_class, b.max_tokens)
        assert a.at_s == pytest.approx(b.at_s, abs=1e-5)
        assert a.prompt != b.prompt and a.temperature == 0
        kind = OF_CLASS[a.slo_class]
        assert a.prompt in {ask.prompt for ask in repetitive((kind,), len(plain))}

"""A draft that reads the first and the recent tokens of a context: the text is the target's all the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Served
from tests.engine.harness import Job, Server, run_jobs, whole_texts, workload
from tests.engine.test_greedy import assert_same


def long_jobs(count: int, seed: int) -> list[Job]:
    """Prompts of several chunks each (of 64 tokens), half of them behind a common prefix."""
    rng = random.Random(seed)
    prefix = [rng.randrange(2, 500) for _ in range(130)]
    jobs = []
    for i in range(count):
        prompt = [rng.randrange(2, 500) for _ in range(rng.choice((5, 40, 66)))]
        prompt = prefix + prompt if i % 2 else prompt
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        jobs.append(Job(tuple(prompt), params, arrival_s=rng.random() * 4))
    return jobs


def texts_are_the_targets(served: Served, stock: Server, pair: Path, jobs: list[Job]) -> dict[str, Any]:
    """What the probe has counted."""
    answers = run_jobs(served.server, jobs)
    assert_same(pair, jobs, answers, whole_texts(stock, jobs))
    finished = [a["meta_info"] for a in answers if a is not None]
    assert sum(m["num_retractions"] for m in finished) > 1, "too few retractions"
    assert any(m["cached_tokens"] > 100 for m in finished), "no long prefix was shared"
    stats = served.probe.read()
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"
    return stats


def test_a_target_that_drafts_for_itself_says_the_same(alone: Served, stock: Server, pair: Path) -> None:
    """Its own cache is audited by the fixture: what its draft steps write into it must not last."""
    jobs = workload(40, seed=25, leave_every=13) + long_jobs(16, seed=26)
    stats = texts_are_the_targets(alone, stock, pair, jobs)
    assert stats["unread"] > 5_000, "its drafts have read nearly everything"


def test_one_request_may_fill_the_pool(alone: Served, stock: Server) -> None:
    """But for the slots that its last iteration writes. It ends there, and a longer prompt is refused."""
    params = {"temperature": 0, "max_new_tokens": 450, "ignore_eos": True}
    got = alone.server.generate(input_ids=[5, 6, 7], sampling_params=params)
    right = stock.generate(input_ids=[5, 6, 7], sampling_params={**params, "max_new_tokens": 240})
    assert got["output_ids"][:240] == right["output_ids"]
    assert got["meta_info"]["finish_reason"]["type"] == "length"
    assert 370 < got["meta_info"]["completion_tokens"] < 420
    answer = alone.server.post(
        "/generate", {"input_ids": [5] * 415, "sampling_params": {"max_new_tokens": 5}}
    )
    assert answer.status_code == 400 and "exceeds the maximum allowed length" in answer.text


def test_text_is_the_targets_at_any_window(sparse: Served, stock: Server, pair: Path) -> None:
    jobs = workload(60, seed=23, leave_every=13) + long_jobs(24, seed=24)
    stats = texts_are_the_targets(sparse, stock, pair, jobs)
    assert stats["catch_ups"] > 20, "no draft ever had to catch up"
    assert stats["draft_audits"][0] > 20, "hardly any draft cache could be audited"
    assert stats["unread"] > 10_000, "the draft has read nearly everything"
    assert stats["windows"].keys() >= {"16", "17", "40", "100"}, "chance has left a window out"
    shares = httpx.get(sparse.server.url + "/slo/snapshot.json", timeout=30).json()["draft_windows"]
    assert {"all", "16"} <= set(shares) and sum(shares.values()) == pytest.approx(1)

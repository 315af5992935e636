"""Drafts from earlier text: exact without a draft model, kept apart by API key, limited by the client."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Served
from tests.engine.harness import Server, run_jobs, whole_texts, workload
from tests.engine.test_greedy import assert_same

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def ask(server: Server, prompt: list[int], key: str = "one", **headers: str) -> Any:
    answer = httpx.post(
        server.url + "/generate",
        json={"input_ids": prompt, "sampling_params": GREEDY},
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(seed: int) -> list[int]:
    """Tokens without a repetition."""
    return random.Random(seed).sample(range(2, 500), 40)


def accepted(answer: Any) -> int:
    return int(answer["meta_info"]["slo"]["drafts"].get("suffix", {}).get("accepted", 0))


def test_text_is_the_same_and_comes_in_fewer_verifications(
    retrieving: Served, stock: Server, pair: Path
) -> None:
    jobs = workload(60, seed=31, leave_every=9)
    staying = [j for j in jobs if j.disconnect_after is None]
    expected = whole_texts(stock, staying)
    run_jobs(retrieving.server, jobs, speed=4)
    again = run_jobs(retrieving.server, staying, speed=4)
    assert_same(pair, staying, again, expected)
    answers = [a["meta_info"] for a in again if a is not None]
    tokens = sum(m["completion_tokens"] - 1 for m in answers)
    verifications = sum(m.get("spec_verify_ct", 0) for m in answers)  # none for a single token
    assert tokens > 2 * verifications, "all of it was there before"
    drafts = [m["slo"]["drafts"].get("suffix") for m in answers]
    for counts in filter(None, drafts):
        assert counts["proposed"] >= counts["verified"] >= counts["accepted"] >= 0
    assert sum(map(accepted, filter(None, again))) > 0.5 * tokens


def test_one_key_is_never_proposed_what_another_was_served(retrieving: Served) -> None:
    prompt = prompt_of(1)
    first = ask(retrieving.server, prompt, "one")
    other = ask(retrieving.server, prompt, "other")
    again = ask(retrieving.server, prompt, "one")
    assert first["output_ids"] == other["output_ids"] == again["output_ids"]
    assert accepted(other) == accepted(first), "what the other key was served helped"
    assert accepted(again) > accepted(first) + 8


@pytest.mark.parametrize(("limit", "most"), [("off", 1), ("0", 1), ("2", 3)])
def test_a_client_can_limit_speculation(retrieving: Served, limit: str, most: int) -> None:
    prompt = prompt_of(2)
    free = [ask(retrieving.server, prompt) for _ in range(2)][1]
    assert accepted(free) > 8
    limited = ask(retrieving.server, prompt, **{"x-adaserve-speculation": limit})
    assert limited["output_ids"] == free["output_ids"]
    assert limited["meta_info"]["spec_verify_ct"] >= (len(limited["output_ids"]) - 1) / most
    if most == 1:
        assert limited["meta_info"]["slo"]["drafts"] == {}


def test_each_source_is_counted(served: Served) -> None:
    """Beside draft models, under little memory; other tests say that the text is right."""
    prompt = prompt_of(3)
    answers = [ask(served.server, prompt) for _ in range(3)]
    sources = ["model", "second_model", *(["suffix"] if served.name == "overlap" else [])]
    assert (accepted(answers[-1]) > 8) == ("suffix" in sources)
    buckets = served.server.internal_state()["adaserve"]["stats"]["buckets"]
    for source in ("model", "second_model", "suffix"):
        proposed, verified, taken = (
            sum(b["sums"].get(f"{stage} by {source}", 0) for b in buckets)
            for stage in ("proposed", "verified", "accepted")
        )
        assert proposed >= verified >= taken >= 0
        assert (taken > 0) == (source in sources)

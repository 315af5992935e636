"""Greedy output is what the same server gives without speculation, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaserve.scheduler.interface import MODEL, SECOND_MODEL
from tests.engine.conftest import TREES, Served, adaserve_server
from tests.engine.harness import CONTEXT, Job, Server, Zygote, run_jobs, whole_texts, workload

TIE = 1e-4
"""Two best logits closer than this are a tie: rounding of batch shapes may decide it either way."""


@pytest.fixture(scope="session")
def jobs() -> list[Job]:
    return workload(132, seed=5, leave_every=11, spread_s=2.4)


@pytest.fixture(scope="session")
def expected(stock: Server, jobs: list[Job]) -> list[list[int]]:
    """What the server without speculation says, to all prompts, with nobody leaving."""
    return whole_texts(stock, jobs)


def is_tie(pair: Path, prompt: tuple[int, ...], first: list[int], second: list[int]) -> bool:
    """Whether two outputs part where the target's two best logits are equal within rounding."""
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if shared is None:
        return False
    model = transformers.LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    with torch.no_grad():
        best = model(torch.tensor([[*prompt, *first[:shared]]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1]) < TIE


def assert_same(pair: Path, jobs: list[Job], answers: list[Any], expected: list[list[int]]) -> None:
    for job, answer, right in zip(jobs, answers, expected, strict=True):
        if answer is None:
            continue
        got = answer["output_ids"]
        assert got == right or is_tie(pair, job.input_ids, got, right), (job, got, right)


def test_staggered_requests_with_retractions_and_disconnects(
    served: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    answers = run_jobs(served.server, jobs)
    assert_same(pair, jobs, answers, expected)
    finished = [a["meta_info"] for a in answers if a is not None]
    assert len(finished) == 120
    assert sum(m["num_retractions"] for m in finished) > 5, "too few retractions"
    assert any(m["cached_tokens"] > 0 for m in finished), "no prefix was shared"
    stats = served.probe.read()
    per_iteration = 1 + stats["accepted"] / stats["rows"]
    assert 1.05 < per_iteration < 1 + 4, "the draft agrees too rarely or too often to test anything"
    assert stats["moved"] > 20, "compaction was not exercised"
    assert stats["catch_ups"] > 20, "no draft ever had to catch up"
    assert min(stats["draft_audits"]) > 50, "hardly any cache of one of the drafts could be audited"
    for bits in (MODEL, SECOND_MODEL, MODEL | SECOND_MODEL):
        assert stats["by_source"].get(str(bits), 0) > 10, "a draft model had nothing of its own"
    assert len(stats["depths"]) >= 4, "the policies all drafted alike"
    served.server.assert_idle_and_clean()


def test_a_second_round_finds_clean_state(
    served: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    """The same again after a flush, faster, on reused request slots."""
    assert_same(pair, jobs[:50], run_jobs(served.server, jobs[:50], speed=3), expected[:50])
    stats = served.probe.read()
    assert stats["states"] <= 24 + 1, "worker states outlive their request slots"


def test_fifty_streams_at_once(
    served: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    chosen = [(j, e) for j, e in zip(jobs, expected, strict=True) if j.disconnect_after is None][:50]
    now = [Job(j.input_ids, j.params) for j, _ in chosen]
    answers = run_jobs(served.server, now)
    assert_same(pair, now, answers, [e for _, e in chosen])
    served.server.assert_idle_and_clean()


def test_the_context_can_be_filled(served: Served, stock: Server) -> None:
    """Trees near the end of the context have positions and slots beyond it; nothing of them may be kept."""
    prompt = list(range(2, 2 + CONTEXT - 20))
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    }
    right, got = stock.generate(**body), served.server.generate(**body)
    assert got["output_ids"] == right["output_ids"]
    assert got["meta_info"]["finish_reason"] == right["meta_info"]["finish_reason"]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_new_tokens(served: Served, stock: Server, tokens: int) -> None:
    body = {"input_ids": [7, 8, 9, 10], "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
    got = served.server.generate(**body)
    assert got["output_ids"] == stock.generate(**body)["output_ids"]
    assert got["meta_info"]["completion_tokens"] == tokens


def test_a_copy_of_the_target_accepts_everything(
    copied: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    staying = [Job(j.input_ids, j.params, j.arrival_s) for j in jobs]
    answers = run_jobs(copied.server, staying)
    assert_same(pair, staying, answers, expected)
    for answer in answers:
        assert answer is not None
        info = answer["meta_info"]
        # The first token comes from the prefill; then every iteration gives 4 drafts and a bonus.
        decoded, iterations = info["completion_tokens"] - 1, info.get("spec_verify_ct", 0)
        assert iterations == -(-decoded // 5), info
        if iterations:
            assert info["spec_num_proposed_drafts"] == info["spec_num_correct_drafts"], info


def test_models_that_our_kernels_do_not_cover(
    zygote: Zygote, stock: Server, pair: Path, tmp_path: Path
) -> None:
    """SGLang's own forward verifies trees, and drafts them."""
    server, probe = adaserve_server(
        tmp_path, pair, "noisy", {**TREES, "cpu_weights": "off"}, {"audit_every": 1 << 30}
    )
    jobs = workload(40, seed=21)
    expected = whole_texts(stock, jobs)
    with server.running(zygote):
        assert_same(pair, jobs, run_jobs(server, jobs, speed=2), expected)
        server.assert_idle_and_clean()
        weights = server.internal_state()["adaserve"]["device"]["weights"]
    assert weights == {"target": "sglang", "drafts": ["sglang"]}
    stats = probe.read()
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"

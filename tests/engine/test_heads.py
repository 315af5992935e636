"""Heads draft: the text is the target's, and they propose what SGLang's own classes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.chi_square import chi_square_p
from tests.engine.conftest import Served
from tests.engine.harness import Job, run_jobs
from tests.engine.heads import headed_jobs
from tests.engine.test_greedy import TIE
from tests.engine.test_sampling import SMALLEST_P, SUSPICIOUS_P

PROMPT = [5, 17, 33, 99, 250]
TEMPERATURE, SAMPLES, TOKENS, BINS = 0.7, 250, 6, 20
MOVES = 20
"""More nodes than these have to be moved in the KV cache, or that is not tested."""


@pytest.fixture
def target(headed: Served, headed_pair: Path, qwen3_pair: Path, mtp_pair: Path) -> Any:
    folder = {"qwen3": qwen3_pair, "mtp": mtp_pair}.get(headed.name, headed_pair)
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


def assert_best(target: Any, jobs: list[Job], answers: list[Any]) -> None:
    """Every token of every answer, of those that came, is the target's best one behind those before it."""
    for job, answer in zip(jobs, answers, strict=True):
        if answer is None:
            continue
        said, at = answer["output_ids"], len(job.input_ids) - 1
        with torch.no_grad():
            logits = target(torch.tensor([[*job.input_ids, *said]])).logits[0, at:-1]
        lost = logits.max(-1).values - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert lost.max() < TIE, (job, said)
        wanted = job.params["max_new_tokens"]
        assert len(said) == wanted or (said[-1] == 0 and not job.params["ignore_eos"]), "it ended early"


@pytest.mark.parametrize("headed", ["eagle3", "qwen3", "mtp"], indirect=True)
def test_the_same_two_steps_as_sglang(headed: Served) -> None:
    """The same beams by the same parents, with the same scores, for the same hidden states."""
    heads = headed.probe.read()["heads"]
    (tokens, parents, scores), (their_tokens, their_parents, their_scores) = heads["ours"], heads["sglang"]
    assert tokens == their_tokens
    assert parents == their_parents
    assert scores == pytest.approx(their_scores, rel=1e-4)
    assert len(set(tokens[:3])) == 3 and len(tokens) == 6


def test_greedy_is_the_target_alone(headed: Served, target: Any) -> None:
    """Every token of every answer is the target's best one behind those before it."""
    jobs = headed_jobs()
    for _ in range(2):  # Medusa's heads, which are random, make 32 moves a round, and sometimes 20
        answers = run_jobs(headed.server, jobs, speed=2)
        assert_best(target, jobs, answers)
        stats = headed.probe.read()
        if stats["moved"] > MOVES:
            break
    finished = [a["meta_info"] for a in answers if a is not None]
    assert sum(m["num_retractions"] for m in finished) > 0, "no retractions"
    assert any(m["cached_tokens"] > 0 for m in finished), "no prefix was shared"
    assert stats["hidden_audits"] > 50, "hardly any hidden states could be audited"
    assert stats["moved"] > MOVES, "compaction was not exercised"
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 4, "heads agree too rarely or too often"
    if headed.name != "medusa":
        assert stats["catch_ups"] > 20, "the head never had to catch up"
        assert stats["draft_audits"][0] > 50, "hardly any cache of the head could be audited"
    headed.server.assert_idle_and_clean()


def shares_above(headed: Served, target: Any, samples: int) -> np.ndarray:
    """The share of the target's probability that lies above each token that the worker drew."""
    params = {"temperature": TEMPERATURE, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = headed.server.generate(input_ids=[PROMPT] * samples, sampling_params=params)
    texts = torch.tensor([[*PROMPT, *a["output_ids"]] for a in answers])
    with torch.no_grad():
        p = (target(texts).logits[:, len(PROMPT) - 1 : -1].double() / TEMPERATURE).softmax(-1)
    drawn = p.gather(2, texts[:, len(PROMPT) :, None])
    above = (p * (p > drawn)).sum(-1) + drawn[..., 0] * torch.rand(
        drawn.shape[:2], dtype=torch.double, generator=torch.Generator().manual_seed(1)
    )
    decoded: np.ndarray = above[:, 1:].flatten().numpy()  # the first token is SGLang's own draw
    return decoded


def uniform_p(shares: np.ndarray) -> float:
    counts = np.histogram(shares, BINS, (0, 1))[0].astype(float)
    return chi_square_p(counts, np.full(BINS, len(shares) / BINS))


@pytest.mark.parametrize("headed", ["eagle3", "mtp", "medusa"], indirect=True)
def test_samples_have_the_targets_distribution(headed: Served, target: Any) -> None:
    """The shares are uniform if each token was drawn from the target's own distribution behind its text."""
    shares = shares_above(headed, target, SAMPLES)
    if uniform_p(shares) < SUSPICIOUS_P:
        assert uniform_p(shares_above(headed, target, 2 * SAMPLES)) > SMALLEST_P
    assert uniform_p(shares**1.4) < SMALLEST_P, "too few samples to see anything"
    assert headed.probe.read()["accepted"] > 0

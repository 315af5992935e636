"""The GPU's worker in a real server on a CPU, under the overlap schedule that GPUs use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import POLICIES, TIGHT, TREES, Served, adaserve_server, alone_server, audited
from tests.engine.harness import Job, Server, Zygote, run_jobs, whole_texts, workload
from tests.engine.test_features import PROMPTS, assert_equal_answers, greedy
from tests.engine.test_grammar import GRAMMARS, job
from tests.engine.test_greedy import assert_same
from tests.engine.test_heads import assert_best


@pytest.fixture(scope="module")
def device(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A draft that agrees on most tokens and reads another part of each context in every iteration, all
    policies in turn, plain decoding in a row as well, little KV."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("device"),
        pair,
        "noisy",
        TREES,
        {"rotate": [*POLICIES, *["none"] * 4], "windows": [0, 0, 16, 40]},
        overlap=True,
        **TIGHT,
    )
    server.environment[DEVICE_PATH_ENV] = "1"
    with server.running(zygote):
        yield Served("device", server, probe)
        server.assert_idle_and_clean()


def test_greedy_is_the_target_alone(device: Served, stock: Server, pair: Path) -> None:
    jobs = workload(60, seed=11, leave_every=13)
    expected = whole_texts(stock, jobs)
    answers = run_jobs(device.server, jobs, speed=2)
    assert_same(pair, jobs, answers, expected)
    finished = [a["meta_info"] for a in answers if a is not None]
    assert any(m["cached_tokens"] > 0 for m in finished), "no prefix was shared"
    stats = device.probe.read()
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"
    assert len(stats["depths"]) >= 3, "the policies all drafted alike"
    assert stats["unread"] > 1000, "the draft has read nearly everything"
    assert stats["lacking"] <= 0, "it wrote where it must not"
    assert stats["early"] > 0.2 * stats["iterations"], "hardly anything was drafted early"
    assert stats["ahead"] > 0.1 * stats["iterations"], "hardly anything was verified ahead"
    assert stats["taken_all"] > 0.1 * stats["iterations"], "hardly anything was verified unread"
    state = device.server.internal_state()["adaserve"]
    assert state["device"]["device"] == "cpu" and state["device"]["captured"] is False
    device.server.assert_idle_and_clean()


@pytest.fixture(scope="module", params=["eagle3", "mtp", "medusa"])
def headed_device(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    headed_pair: Path,
    mtp_pair: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """An EAGLE-3 head drafts, or an MTP layer, in SGLang's own class; or Medusa heads."""
    name = str(request.param)
    draft = {"eagle3": "eagle3", "mtp": "target", "medusa": None}[name]
    medusa = {"medusa": str(headed_pair / "medusa")} if name == "medusa" else {}
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(f"{name}_device"),
        mtp_pair if name == "mtp" else headed_pair,
        draft,
        {**TREES, **medusa},
        {"rotate": POLICIES, "hold_back": True, "compare_head": draft is not None, "audit_every": 1 << 30},
        overlap=True,
        **{**TIGHT, "chunked-prefill-size": 16},
    )
    server.environment[DEVICE_PATH_ENV] = "1"
    with server.running(zygote):
        yield Served(name, server, probe)
        server.assert_idle_and_clean()
        assert probe.read()["wrong_lengths"] == []


@pytest.mark.parametrize("headed_device", ["eagle3", "mtp"], indirect=True)
def test_a_head_drafts_as_in_sglang(headed_device: Served) -> None:
    """The same beams of two steps, by the same parents and with the same scores, and the target's text."""
    heads = headed_device.probe.read()["heads"]
    (tokens, parents, scores), (their_tokens, their_parents, their_scores) = heads["ours"], heads["sglang"]
    assert (tokens, parents) == (their_tokens, their_parents) and len(tokens) == 6
    assert scores == pytest.approx(their_scores, rel=1e-4)


def test_greedy_with_a_head_is_the_target_alone(
    headed_device: Served, headed_pair: Path, mtp_pair: Path
) -> None:
    jobs = workload(66, seed=5, leave_every=11)
    folder = (mtp_pair if headed_device.name == "mtp" else headed_pair) / "target"
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_best(target, jobs, run_jobs(headed_device.server, jobs, speed=2))
    stats = headed_device.probe.read()
    assert not stats["early"], "a head reads first what was accepted"
    assert stats["ahead"] > 10, "hardly anything was verified ahead"
    assert stats["taken_all"] > 10, "hardly anything was verified unread"
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 4, "the head agrees too rarely or too often"
    assert stats["moved"] > 10, "compaction was not exercised"
    assert stats["catch_ups"] > 10 or headed_device.name == "medusa", "catching up was not exercised"


@pytest.fixture(scope="module")
def alone_device(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server, probe = alone_server(tmp_path_factory.mktemp("alone_device"), pair)
    server.environment[DEVICE_PATH_ENV] = "1"
    yield from audited(zygote, "alone_device", server, probe)


def test_greedy_is_the_target_alone_where_it_drafts_for_itself(
    alone_device: Served, stock: Server, pair: Path
) -> None:
    jobs = workload(60, seed=3, leave_every=13)
    expected = whole_texts(stock, jobs)
    assert_same(pair, jobs, run_jobs(alone_device.server, jobs, speed=2), expected)
    stats = alone_device.probe.read()
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 5, "it agrees with itself too rarely or too often"
    assert stats["taken_all"] > 10, "hardly anything was verified unread"


def test_logprobs(device: Served, stock: Server) -> None:
    body = {"input_ids": [7, 8, 9, 10], "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    mine, right = (s.generate(**body, return_logprob=True) for s in (device.server, stock))
    values = [[t[0] for t in a["meta_info"]["output_token_logprobs"]] for a in (mine, right)]
    assert mine["output_ids"] == right["output_ids"]
    assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.9, "top_p": 0.8}, {"temperature": 0.7, "frequency_penalty": 0.5}]
)
def test_sampled_requests_are_served(device: Served, params: dict[str, float]) -> None:
    answer = device.server.generate(
        input_ids=[7, 8, 9], sampling_params={**params, "max_new_tokens": 24, "ignore_eos": True}
    )
    assert answer["meta_info"]["completion_tokens"] == 24


@pytest.mark.parametrize("kind", GRAMMARS)
def test_structured_output_is_that_of_plain_decoding(device: Served, stock: Server, kind: str) -> None:
    jobs = [job(prompt, **GRAMMARS[kind]) for prompt in PROMPTS]
    plain = [Job(tuple(p), greedy(max_new_tokens=30)) for p in PROMPTS]
    assert_equal_answers(device.server, stock, jobs + plain)

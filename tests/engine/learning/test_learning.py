"""A draft that learns on a real server: texts stay what they are, and no trainer can do harm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import POLICIES, Served, adaserve_server
from tests.engine.harness import Job, Server, Zygote, run_jobs, whole_texts, workload
from tests.engine.pairs import VOCAB
from tests.engine.test_greedy import assert_same
from tests.engine.test_heads import assert_best
from tests.engine.test_sampling import SMALLEST_P, comparisons, sample

LEARNING = {
    "policy": "chain-4", "max_depth": 4, "learn": True, "learn_share": 1.0, "learn_nice": 0,
    "learn_rate": 1e-3, "learn_memory_mb": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def learning(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Every few iterations the draft has other weights, with requests in flight; a trainer runs beside it."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("learning"),
        pair,
        "noisy",
        LEARNING,
        {"swap": [7, str(pair / "target"), str(pair / "noisy")], "audit_every": 1 << 20},
        overlap=True,
    )
    with server.running(zygote):
        yield Served("learning", server, probe)
        server.assert_idle_and_clean()


@pytest.fixture(scope="module")
def learning_head(
    zygote: Zygote, headed_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The same of an EAGLE-3 head; its other weights are noise."""
    head, other = headed_pair / "eagle3", tmp_path_factory.mktemp("other")
    tensors = load_file(head / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    for name, t in tensors.items():
        if name.startswith("midlayer."):
            tensors[name] = t + 0.5 * t.std() * torch.randn(t.shape, generator=noise)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("learning_head"),
        headed_pair,
        "eagle3",
        LEARNING,
        {"swap": [7, str(head), str(other)], "audit_every": 1 << 20},
        overlap=True,
    )
    with server.running(zygote):
        yield Served("learning_head", server, probe)
        server.assert_idle_and_clean()


@pytest.fixture(params=["noisy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "map"))])
def by_gpu_code(
    request: pytest.FixtureRequest, zygote: Zygote, headed_pair: Path, pair: Path, tmp_path: Path
) -> Iterator[tuple[Served, Path]]:
    """The code of GPUs on a CPU, under policies of every kind; and the target's folder. ``map``: a draft that
    knows half of the tokens."""
    name, more = str(request.param), dict[str, Any]()
    if name == "map":
        name, more = "noisy", {"speculative-token-map": tmp_path / "tokens.pt"}
        torch.save(list(range(0, VOCAB, 2)), tmp_path / "tokens.pt")
    models = headed_pair if name == "eagle3" else pair
    options = {"rotate": POLICIES, "swap": [7, str(models / name)], "audit_every": 1 << 20}
    server, probe = adaserve_server(tmp_path, models, name, LEARNING, options, overlap=True, **more)
    server.environment[DEVICE_PATH_ENV] = "1"
    with server.running(zygote):
        yield Served(name, server, probe), models / "target"
        server.assert_idle_and_clean()


def state(server: Server) -> dict[str, Any]:
    return dict(server.internal_state()["adaserve"]["stats"]["learning"] or {})


def wait_until(true: Callable[[], bool], server: Server, seconds: float = 180.0) -> None:
    """Of an idle server too: it looks at its trainer."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, (list(state(server).items()), server.tail())
        time.sleep(0.3)


def serve_until_judged(server: Server, jobs: list[Job], seconds: float = 300.0) -> dict[str, Any]:
    """Serves until a candidate is judged: how many requests are recorded depends on how many run at a time
    and on how fast the trainer reads, and a trainer on a busy host rests between its rounds."""
    end = time.monotonic() + seconds
    long = [j for j in jobs if j.params["max_new_tokens"] > 12]
    run_jobs(server, long * 2, speed=4)
    while not (now := state(server))["judged"]:
        assert time.monotonic() < end, (list(now.items()), server.tail())
        time.sleep(1.0)
        run_jobs(server, long[:8], speed=4)
    return now


def trainer_of(server: Server) -> psutil.Process:
    assert server.pid is not None
    children = psutil.Process(server.pid).children(recursive=True)
    alive = [c for c in children if c.status() != psutil.STATUS_ZOMBIE]
    (trainer,) = [c for c in alive if "adaserve.trainer.process" in c.cmdline()]
    return trainer


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return workload(100, seed=17, max_new=40, spread_s=2.0)


@pytest.fixture(scope="module")
def expected(stock: Server, jobs: list[Job]) -> list[list[int]]:
    return whole_texts(stock, jobs)


def test_texts_are_the_same_while_drafts_are_swapped_under_them(
    learning: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    wait_until(lambda: state(learning.server).get("trainer") == "running", learning.server)
    answers = run_jobs(learning.server, jobs)
    assert_same(pair, jobs, answers, expected)
    long = [a["meta_info"]["spec_verify_ct"] for a in answers if a and len(a["output_ids"]) == 40]
    assert max(long) > 7, "no request lived through a swap"
    assert min(long) < 20, "no draft was good"
    assert learning.probe.read()["poisoned"] and state(learning.server)["rejected"] >= 1


def test_a_head_learns_and_texts_stay_the_targets(
    learning_head: Served, headed_pair: Path, jobs: list[Job]
) -> None:
    """Weights are swapped with requests in flight; the trainer gets hidden states, and judges."""
    server = learning_head.server
    wait_until(lambda: state(server).get("trainer") == "running", server)
    target = transformers.AutoModelForCausalLM.from_pretrained(headed_pair / "target", dtype=torch.float32)
    assert_best(target, jobs, run_jobs(server, jobs))
    now = serve_until_judged(server, jobs)
    assert now["requests"] >= 32 and now["trainer"] == "running"
    assert 0 < now["judged"][-1]["first"] <= 4
    stats = learning_head.probe.read()
    assert stats["poisoned"] and stats["accepted"] > 50, "the head's drafts were never right"


def test_the_code_of_gpus_learns_and_texts_stay_the_targets(
    by_gpu_code: tuple[Served, Path], jobs: list[Job]
) -> None:
    """What is recorded comes with outcomes that nobody has waited for."""
    served, folder = by_gpu_code
    wait_until(lambda: state(served.server).get("trainer") == "running", served.server)
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_best(target, jobs, run_jobs(served.server, jobs))
    now = serve_until_judged(served.server, jobs)
    assert now["requests"] >= 32 and now["tokens"] > 32 * 8 and 0 < now["judged"][-1]["first"] <= 4
    stats = served.probe.read()
    assert stats["poisoned"] and now["rejected"] >= 1
    assert stats["ahead"] > 10 and stats["taken_all"] > 10, "while it learned, the device waited for the host"
    assert (stats["early"] > 10) == (served.name == "noisy"), "a head reads first what was accepted"


def test_candidates_are_judged_on_what_was_served(learning: Served, jobs: list[Job]) -> None:
    now = serve_until_judged(learning.server, jobs)
    assert now["requests"] >= 32 and now["tokens"] > 32 * 8 and now["cpu_s"] > 0
    assert 0 < now["judged"][-1]["first"] <= 4
    snapshot = httpx.get(learning.server.url + "/slo/snapshot.json", timeout=30).json()
    assert snapshot["learning"]["requests"] >= 32


def test_a_request_can_forbid_it(learning: Served) -> None:
    def generate(headers: dict[str, str], custom: dict[str, Any] | None = None) -> int:
        params = {"temperature": 0.8, "max_new_tokens": 20, "ignore_eos": True, "custom_params": custom}
        body = {"input_ids": [9, 8, 7], "sampling_params": params}
        url = learning.server.url + "/generate"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        time.sleep(0.5)
        learning.server.generate(input_ids=[5], sampling_params={"temperature": 0, "max_new_tokens": 3})
        return int(state(learning.server)["recorded"] + state(learning.server)["dropped"])

    before = generate({})
    assert generate({"x-adaserve-learn": "off"}) == before
    assert generate({}, {"adaserve_learn": False}) == before
    assert generate({"x-adaserve-learn": "on"}) == before + 1


def test_sampled_texts_have_the_same_distribution_while_drafts_are_swapped(
    learning: Served, stock: Server
) -> None:
    params = {"temperature": 0.7}
    got, right = sample(learning.server, params), sample(stock, params)
    if min(comparisons(got, right).values()) < SMALLEST_P:  # one sound run in 2,000; both in four millions
        got, right = sample(learning.server, params), sample(stock, params)
    assert min(comparisons(got, right).values()) > SMALLEST_P
    assert len({t[2] for t in right}) > 5, "nearly deterministic: the comparison says nothing"


def test_a_trainer_that_hangs_or_is_killed_harms_nothing(
    learning: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    trainer = trainer_of(learning.server)
    os.kill(trainer.pid, signal.SIGSTOP)
    assert_same(pair, jobs[:50], run_jobs(learning.server, jobs[:50], speed=2), expected[:50])
    os.kill(trainer.pid, signal.SIGKILL)
    wait_until(lambda: state(learning.server)["trainer"] == "restarting", learning.server)
    assert_same(pair, jobs[50:], run_jobs(learning.server, jobs[50:], speed=2), expected[50:])
    assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE
    wait_until(lambda: state(learning.server)["trainer"] == "running", learning.server, seconds=120)
    assert trainer_of(learning.server).pid != trainer.pid

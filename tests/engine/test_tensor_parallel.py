"""Two tensor-parallel ranks over gloo: the GPU's worker on a CPU, plans of rank 0, same text as alone.

Every rank drafts, verifies and keeps books. Ranks that drew or selected differently would run forwards of
other shapes, in which gloo's sums fail or wait for ever, so that a finished request says that they agreed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from adaserve.host.device import DEVICE_PATH_ENV
from adaserve.loadgen.server_metrics import parse_metrics
from tests.engine.conftest import adaserve_server
from tests.engine.harness import Job, Server, Zygote, run_jobs, whole_texts, workload
from tests.engine.heads import headed_jobs
from tests.engine.test_features import greedy
from tests.engine.test_grammar import AMBIGUOUS, assert_slow_one_ends, job
from tests.engine.test_greedy import assert_same
from tests.engine.test_heads import assert_best

CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""SGLang wants a memory node per rank, or to be told the cores."""


RECORDING = "iterations.jsonl"

TIGHT_MS = 30.0
"""A TPOT SLO that one request meets here, and not many."""


@contextmanager
def ranks(zygote: Zygote, folder: Path, pair: Path, draft: str, size: int = 2) -> Iterator[Server]:
    config = {"policy": "priced", "max_depth": 4, "max_width": 3, "record": str(folder / RECORDING)}
    arguments: dict[str, Any] = {"tp-size": size, "max-running-requests": 16, "enable-metrics": True}
    server, _ = adaserve_server(folder, pair, draft, config, overlap=True, **arguments)
    del server.environment["ADASERVE_PROBE"]  # it knows one rank only
    server.environment |= {DEVICE_PATH_ENV: "1", **(CORES if size > 1 else {})}
    with server.running(zygote):
        yield server
        server.assert_idle_and_clean()


@pytest.fixture(scope="module")
def two_ranks(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ranks(zygote, tmp_path_factory.mktemp("ranks"), pair, "noisy") as server:
        yield server


def set_policy(server: Server, name: str) -> None:
    answer = server.post("/set_internal_state", {"server_args": {f"adaserve_policy={name}": 1}})
    assert answer.json() == [True], answer.text


@pytest.mark.slow
def test_greedy_is_the_target_alone(two_ranks: Server, stock: Server, pair: Path) -> None:
    for number, policy in enumerate(("priced", "adaserve", "chain-3", "turbospec", "none")):
        set_policy(two_ranks, policy)
        jobs = workload(12, seed=20 + number, max_new=24)
        expected = whole_texts(stock, jobs)
        assert_same(pair, jobs, run_jobs(two_ranks, jobs, speed=4), expected)
    log = two_ranks.log.read_text(errors="replace")
    assert all(f"TP{rank}] AdaServe: iterations on cpu" in log for rank in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_heads_draft_on_both_ranks(
    kind: str, zygote: Zygote, headed_pair: Path, mtp_pair: Path, tmp_path: Path
) -> None:
    """They read whole hidden states on every rank: as much is accepted as on one."""
    pair, draft = (headed_pair, "eagle3") if kind == "eagle3" else (mtp_pair, "target")
    target = transformers.AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    jobs, accepted = headed_jobs(), {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        with ranks(zygote, folder, pair, draft, size) as server:
            set_policy(server, "chain-3")
            answers = run_jobs(server, jobs, speed=2)
            assert_best(target, jobs, answers)
            infos = [a["meta_info"] for a in answers if a is not None]
            accepted[size] = sum(m["completion_tokens"] for m in infos) / sum(
                m.get("spec_verify_ct", 0) for m in infos
            )
    assert accepted[1] > 1.2, "the head hardly ever guessed right"
    assert accepted[2] == pytest.approx(accepted[1], rel=0.05)


@pytest.mark.slow
def test_sampled_requests_draw_alike_on_both_ranks(two_ranks: Server) -> None:
    """Noise belongs to the request, so ranks draw the same; drafts that share it are accepted."""
    set_policy(two_ranks, "chain-3")
    texts = set()
    for params in ({"temperature": 0.9}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}):
        answer = two_ranks.generate(
            input_ids=[7, 8, 9], sampling_params={**params, "max_new_tokens": 24, "ignore_eos": True}
        )
        assert answer["meta_info"]["completion_tokens"] == 24
        texts.add(tuple(answer["output_ids"]))
    assert len(texts) == 3, "every request has noise of its own"


@pytest.mark.slow
def test_metrics_count_a_token_once(two_ranks: Server) -> None:
    """Both ranks serve every request, and Prometheus adds up what their processes say."""

    def counted() -> dict[str, float]:
        samples = parse_metrics(httpx.get(two_ranks.url + "/metrics", timeout=30).text)
        names = ("adaserve:emitted_tokens_total", "adaserve:output_tokens_total")
        return {name: sum(v for (key, _), v in samples.items() if key == name) for name in names}

    before = counted()
    params = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
    answer = two_ranks.generate(input_ids=[7, 8, 9], sampling_params=params)
    assert answer["meta_info"]["completion_tokens"] == 40
    emitted, output = (after - before[name] for name, after in counted().items())
    # The prefill gives the first token, and the last iteration is counted when the next one is.
    assert output == 40 and 20 < emitted < 60


@pytest.mark.slow
def test_an_iteration_is_recorded_once(two_ranks: Server) -> None:
    """One rank writes, and the other has no file of its own."""
    params = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0}
    for _ in range(3):
        two_ranks.generate(input_ids=[7, 8, 9], sampling_params=params)
    recording = two_ranks.log.parent / RECORDING
    assert list(recording.parent.glob(f"{recording.stem}*")) == [recording]
    lines = recording.read_text().splitlines()
    times = [line["plan"]["now_s"] for line in map(json.loads, lines[1:-1]) if "plan" in line]
    assert len(times) > 20 and len(set(times)) == len(times)


@pytest.mark.slow
def test_both_ranks_end_a_request_whose_grammar_takes_long(two_ranks: Server) -> None:
    jobs = [job([7, 8], **AMBIGUOUS, max_new_tokens=240), Job((7, 8), greedy(max_new_tokens=200))]
    assert_slow_one_ends(two_ranks, *jobs)
    two_ranks.assert_idle_and_clean()


def held_back(server: Server) -> float:
    """Prompts that the gate held back, summed over iterations."""
    stats = server.internal_state()["adaserve"]["stats"]
    return sum(bucket["sums"].get("gated", 0.0) for bucket in (stats["older"], *stats["buckets"]))


@pytest.mark.slow
def test_prompts_wait_and_start_alike_on_both_ranks(two_ranks: Server, stock: Server, pair: Path) -> None:
    """When a prompt starts and how large its chunks are goes by the first rank's clock."""
    set_policy(two_ranks, "priced")
    jobs = workload(24, seed=40, max_new=48, spread_s=1.0)
    expected = whole_texts(stock, jobs)
    for mode, waits in (("default", True), ("exclusive", False), ("slack", True)):
        answer = two_ranks.post("/set_internal_state", {"server_args": {f"adaserve_prefill={mode}": 1}})
        assert answer.json() == [True], answer.text
        before = held_back(two_ranks)
        tight = [replace(j, params=j.params | {"custom_params": {"slo_tpot_ms": TIGHT_MS}}) for j in jobs]
        assert_same(pair, jobs, run_jobs(two_ranks, tight), expected)
        assert (held_back(two_ranks) > before) == waits

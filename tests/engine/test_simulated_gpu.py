"""A whole server on a simulated GPU: CUDA's graphs, streams and copies, and the text of the target alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.conftest import ALONE, POLICIES, TIGHT, adaserve_server
from tests.engine.harness import Fresh, Job, Probe, Server, run_jobs, workload
from tests.engine.learning.test_learning import serve_until_judged
from tests.engine.test_heads import assert_best
from tests.simulated_gpu import counts, environment, written_s

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
CUDA = {"device": "cuda", "attention-backend": "triton", "sampling-backend": "pytorch",
        "max-running-requests": 4, "cuda-graph-bs-prefill": 64}  # fmt: skip
MAX_WAITS = 3
"""Of an iteration: the last outcome and the candidates; and what SGLang takes from the last iteration, which
is there by then."""
ROOT = Path(__file__).resolve().parents[2]


def run_script(script: str, folder: Path) -> str:
    """What it prints."""
    variables = environment(folder, folder / "report")
    path = f"{ROOT}{os.pathsep}{variables['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["beams", "prefills"])
def test_searches_and_prefills_are_captured(what: str, tmp_path: Path) -> None:
    """As the first stage of a GPU host does it, before any server."""
    run = f"kernels.run_one({what!r}, 'cuda')['right']"
    script = f"from adaserve.bench.gpu_check import kernels; print({run})"
    assert run_script(script, tmp_path).endswith("True\n")


TWO_STREAMS = """
import operators, torch

a, b = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.set_stream(a)

def read(waits):
    x = torch.zeros(1000, device="cuda")
    if waits:
        b.wait_stream(a)
    with torch.cuda.stream(b):
        x + 1

def free(waits):
    x = torch.zeros(1000, device="cuda")
    b.wait_stream(a)
    with torch.cuda.stream(b):
        x + 1
    if waits:
        x.record_stream(b)
    del x
    torch.ones(1000, device="cuda")  # where x was

def replay(waits):
    x, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    x.add_(1)
    if waits:
        a.synchronize()
    with torch.cuda.stream(b):
        graph.replay()

for case in (read, free, replay):
    for waits in (False, True):
        torch.cuda.synchronize()
        before = operators.counted("race: ")
        case(waits)
        print(operators.counted("race: ") > before, end=" ")
"""


def test_two_streams_in_the_same_memory_are_seen(tmp_path: Path) -> None:
    assert run_script(TWO_STREAMS, tmp_path).split() == ["True", "False"] * 3


OTHERS = ("eagle3", "mtp", "medusa", "self", "learning")
DRAFTED = ("model", "learning")
"""By a model."""
LEARNS = {"learn": True, "learn_device": "cuda", "learn_share": 1.0, "learn_nice": 0, "learn_memory_mb": 16}


@dataclass(frozen=True)
class Simulated:
    name: str
    server: Server
    probe: Probe
    target: Path
    report: Path
    accepted: int  # drafted tokens, at least
    at_start: Counter[str]
    """What was counted before the first request. Where SGLang captures prefills, attention runs beside a
    stream that it does not wait for, on numbers that nobody reads."""

    def counted(self) -> Counter[str]:
        return counted_by_now(self.report)


def counted_by_now(report: Path) -> Counter[str]:
    now_s = time.time()
    while written_s(report) < now_s + 0.1:
        time.sleep(0.1)  # reports come in turns
    return counts(report)


@pytest.fixture(
    scope="module",
    params=["model", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """All policies in turn but for chains of four, little KV. ``self``: the target drafts for itself.
    ``learning``: the draft's weights are exchanged again and again, and a trainer on the GPU makes others."""
    name, report = request.param, tmp_path_factory.mktemp("reports") / "report"
    folders = {"model": "pair", "self": "pair", "learning": "pair", "mtp": "mtp_pair"}
    models: Path = request.getfixturevalue(folders.get(name, "headed_pair"))
    draft = {"model": "noisy", "learning": "noisy", "eagle3": "eagle3", "mtp": "target"}.get(name)
    others = {"medusa": {"medusa": str(models / "medusa")}, "self": ALONE, "learning": LEARNS}.get(name, {})
    swaps = {"swap": [7, str(models / "target"), str(models / "noisy")]} if name == "learning" else {}
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(f"gpu_{name}"),
        models,
        draft,
        {
            "policy": "adaserve",
            "max_depth": 3,
            "max_width": 4,
            "budget": 40,
            "attention": "triton",
            "prefill": "mixed",
            **others,
        },
        {
            "rotate": [*POLICIES[:-1], *["none"] * 3, *["priced"] * 6],
            "audit_every": 1 << 30,  # the audit is the CPU's
            **swaps,
        },
        **{**TIGHT, **CUDA},
    )
    variables = environment(tmp_path_factory.mktemp("device"), report)
    path = f"{server.environment['PYTHONPATH']}:{variables['PYTHONPATH']}"
    server.environment |= {**variables, "PYTHONPATH": path}
    with server.running(Fresh()):
        accepted = 1 if name == "medusa" else 10  # Medusa's are random
        at_start = counted_by_now(report)
        yield Simulated(name, server, probe, models / "target", report, accepted, at_start)
        server.assert_idle_and_clean()
        assert probe.read()["wrong_lengths"] == []


def test_greedy_is_the_target_alone(gpu: Simulated) -> None:
    jobs = workload(16, seed=11, leave_every=7)
    answers = run_jobs(gpu.server, jobs)
    assert_best(
        transformers.AutoModelForCausalLM.from_pretrained(gpu.target, dtype=torch.float32), jobs, answers
    )
    state = gpu.server.internal_state()["adaserve"]["device"]
    assert state["captured"] and state["attention"] == "triton"
    assert all(graphs["graphs"] > 8 for graphs in (*state["draft_graphs"], state["verification_graphs"]))
    stats = gpu.probe.read()
    assert (stats["early"] > 10) == (gpu.name in DRAFTED) and stats["ahead"] > 10
    assert stats["taken_all"] > 10
    assert state["mixed_graphs"]["graphs"] > 4
    assert gpu.server.internal_state()["adaserve"]["times"]["mixed"] > 4, "prompts had forwards of their own"
    assert stats["accepted"] >= gpu.accepted and len(stats["depths"]) >= 2, "next to nothing was drafted"


def test_prompts_are_read_from_graphs(gpu: Simulated) -> None:
    """One of the target and of a draft model each. Where prompts want more, SGLang's, with one more than the
    model has layers; none where a head drafts."""
    log, folders = gpu.server.log.read_text(), {"target": "target", "draft": "noisy"}
    captured = [name for name in folders if f"Capture {name} prefill CUDA graph end" in log]
    expected = {"self": ["target"], **{name: ["target", "draft"] for name in DRAFTED}}
    assert captured == expected.get(gpu.name, [])
    configs = [gpu.target.with_name(folders[name]) / "config.json" for name in captured]
    layers = [json.loads(config.read_text())["num_hidden_layers"] for config in configs]
    of_prompts = gpu.server.internal_state()["adaserve"]["device"]["prompt_graphs"]
    assert len(of_prompts) == (2 if gpu.name in DRAFTED else 1)
    assert all(graphs["graphs"] > 8 for graphs in of_prompts)
    prompt, greedy = list(range(100, 150)), {"max_new_tokens": 1, "temperature": 0}
    before = gpu.counted()
    gpu.server.generate(input_ids=prompt, sampling_params=greedy)
    assert (gpu.counted() - before)["launch graph"] == len(of_prompts)
    # Log-probabilities of the prompt are SGLang's; the draft's prefill is short.
    before = gpu.counted()
    gpu.server.generate(
        input_ids=prompt[::-1], sampling_params=greedy, return_logprob=True, logprob_start_len=0
    )
    of_target = layers[0] + 1 if layers else 0
    assert (gpu.counted() - before)["launch graph"] == of_target + len(of_prompts) - 1


def test_sampled_requests_are_served(gpu: Simulated) -> None:
    """Their noise is added inside of graphs."""
    params = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 24, "ignore_eos": True}
    answer = gpu.server.generate(input_ids=[7, 8, 9], sampling_params=params)
    assert len(answer["output_ids"]) == 24 and all(0 <= token < 512 for token in answer["output_ids"])
    assert gpu.server.internal_state()["adaserve"]["device"]["filters"] == "triton", "logits are sorted"


def test_what_an_iteration_waits_for(gpu: Simulated) -> None:
    """Launched by graphs; no pinned memory is written before it was copied, or read before it came, and no
    stream touches what another one has not finished with."""
    run_jobs(gpu.server, [Job(tuple(range(50, 70)), {"max_new_tokens": 2, "temperature": 0})])
    before = gpu.counted()
    job = Job(tuple(range(50, 70)), {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True})
    iterations = run_jobs(gpu.server, [job])[0]["meta_info"]["spec_verify_ct"]
    found = gpu.counted() - before
    waits = {what: n for what, n in found.items() if what in ("wait for an event", "wait for a stream")}
    assert sum(waits.values()) <= MAX_WAITS * iterations + 8, (iterations, waits)
    ours = {w: n for w, n in found.items() if w.startswith("wait in") or w.startswith("wait for a copy")}
    # The probe makes drafts ready between iterations, a server beside them.
    often = [w for w, n in ours.items() if n > iterations // 2 and "engine/" in w and "swap.py" not in w]
    assert often == [], "an iteration waits for more; a prefill may"
    assert found["launch graph"] >= iterations > 8
    assert not [what for what in gpu.counted() - gpu.at_start if what.startswith("race")]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["learning"], indirect=True)
def test_drafts_are_trained_and_judged_on_the_gpu(gpu: Simulated) -> None:
    now = serve_until_judged(gpu.server, workload(60, seed=17, max_new=40))
    assert now["requests"] >= 32 and 0 < now["judged"][-1]["first"] <= 4
    assert gpu.probe.read()["poisoned"] and now["rejected"] >= 1
    assert not [what for what in gpu.counted() - gpu.at_start if what.startswith("race")]

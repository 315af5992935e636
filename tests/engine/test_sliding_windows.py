"""Models whose layers see the nearest tokens alone, and cap their scores: their text is still their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaserve.host import DEVICE_PATH_ENV
from tests.engine.conftest import RESTLESS, TIGHT, TREES, Served, adaserve_server, audited
from tests.engine.harness import Zygote, run_jobs, workload
from tests.engine.pairs import agreeing_copy, random_model, save_tokenizer
from tests.engine.test_heads import assert_best

GEMMA2 = {
    "hidden_act": "gelu_pytorch_tanh",  # stands in public configurations beside its newer name
    "sliding_window": 20,  # in the first and the third of three layers
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 20.0,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "tie_word_embeddings": True,
    "attn_implementation": "eager",
}


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Tied embeddings say the last token again. Here layers are louder: if windows were longer by one token,
    every fourth token would be another one."""
    model = random_model("Gemma2", 1, **GEMMA2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(2)
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.add_(15)
    return model


@pytest.fixture(scope="module")
def gemmas(gemma: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft that agrees with it on most tokens."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gemmas")
    for name, model in {"target": gemma, "noisy": agreeing_copy(gemma)}.items():
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    return folder


@pytest.fixture(scope="module", params=["cpu", "device"])
def served(
    request: pytest.FixtureRequest, zygote: Zygote, gemmas: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """On a CPU's way, and on that of GPUs."""
    name, folder = str(request.param), tmp_path_factory.mktemp("windows")
    server, probe = adaserve_server(
        folder,
        gemmas,
        "noisy",
        TREES,
        {**RESTLESS, "audit_every": 1 << 30},
        overlap=name == "device",
        **TIGHT,
    )
    if name == "device":
        server.environment[DEVICE_PATH_ENV] = "1"
    yield from audited(zygote, name, server, probe)


def test_greedy_is_the_target_alone(served: Served, gemma: Any) -> None:
    jobs = workload(60, seed=31, leave_every=13, spread_s=1)
    answers = run_jobs(served.server, jobs)
    assert_best(gemma, jobs, answers)
    assert sum(a["meta_info"]["num_retractions"] for a in answers if a is not None) > 1
    stats = served.probe.read()
    assert 1.3 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"

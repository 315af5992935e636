"""Layers that see the nearest tokens alone, cap their scores or have sinks: the text is the target's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import RESTLESS, TIGHT, TREES, Served, adaserve_server, audited
from tests.engine.harness import Zygote, run_jobs, workload
from tests.engine.pairs import agreeing_copy, random_model, save_tokenizer
from tests.engine.test_heads import assert_best

WINDOW = {
    "sliding_window": 20,
    "attn_implementation": "eager",
}  # if it were 21, every fourth token would change


def gemma2() -> Any:
    """Caps; windows in the first and the third of three layers."""
    config = {
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0, "head_dim": 32,
        "query_pre_attn_scalar": 48, "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",  # stands in public configurations beside its newer name
    }  # fmt: skip
    model = random_model("Gemma2", 1, **WINDOW, **config)
    for layer in model.model.layers:  # or tied embeddings would say the last token again
        layer.self_attn.q_proj.weight.mul_(2)
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight.add_(15)
    return model


def granite_swa() -> Any:
    """Sinks; windows in the second and the third of three layers."""
    model = random_model("GraniteSWA", 1, **WINDOW, attention_multiplier=0.18)
    for layer in model.model.layers:
        layer.self_attn.sinks.copy_(torch.tensor([1.5, -1.0, 2.0, 3.0]))  # SGLang keeps them in bf16
    return model


@pytest.fixture(scope="module", params=[(granite_swa, "cpu"), (gemma2, "device")], ids=["granite", "gemma"])
def windowed(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Served]]:
    """A target, served with a draft that agrees with it on most tokens: as on a CPU, or as on GPUs."""
    make, way = request.param
    folder = tmp_path_factory.mktemp("windowed")
    torch.set_num_threads(1)
    with torch.no_grad():
        model = make()
    for name, each in {"target": model, "noisy": agreeing_copy(model)}.items():
        each.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    server, probe = adaserve_server(
        folder, folder, "noisy", TREES, {**RESTLESS, "audit_every": 1 << 30}, overlap=way == "device", **TIGHT
    )
    if way == "device":
        server.environment[DEVICE_PATH_ENV] = "1"
    for served in audited(zygote, way, server, probe):
        yield model, served


def test_greedy_is_the_target_alone(windowed: tuple[Any, Served]) -> None:
    model, served = windowed
    jobs = workload(60, seed=31, leave_every=13, spread_s=1)
    answers = run_jobs(served.server, jobs)
    assert_best(model, jobs, answers)
    assert sum(a["meta_info"]["num_retractions"] for a in answers if a is not None) > 1
    stats = served.probe.read()
    assert 1.3 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"

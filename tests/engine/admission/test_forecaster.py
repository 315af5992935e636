"""Forecasts as the engine makes them, from requests of the scheduler; no server."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine.admission.forecaster import Forecaster
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.engine.request_state import RequestState
from adaserve.patches.scheduler.worker_interface import Load
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.slo.classes import SLOClass, SLOConfig
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.resolve import RequestSLO
from adaserve.slo.stats import SLOStats
from tests.engine.ranks import ALONE

NOW = 1000.0
MODEL = {"model_name": "m"}
LATENCY = LatencyModel(ForwardCost(0.0005), ForwardCost(0.010, per_token_s=0.001))
CLASSES = SLOConfig(
    classes={"coding": SLOClass(name="coding", tpot_ms=22), "chat": SLOClass(name="chat", x_baseline=2)}
)


class Request:
    """What is read of SGLang's Req."""

    def __init__(self, rid: str, slot: int = 0, tpot_s: float = math.inf, prompt: int = 100) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, [1] * prompt, []
        self.num_matched_prefix_tokens, self.prefix_len, self.multimodal_inputs = 0, 0, None
        self.full_untruncated_fill_ids = [1] * prompt
        self.time_stats = SimpleNamespace(created_time=NOW)
        self.kv = SimpleNamespace(req_pool_idx=slot)
        slo = RequestSLO("coding", tpot_s).in_params(None)
        self.sampling_params = SimpleNamespace(
            max_new_tokens=200, top_k=1, temperature=1.0, custom_params=slo
        )
        self.grammar = self.custom_logit_processor = self.to_finish = None


def forecaster(running: list[Request], registry: Any) -> Forecaster:
    states = {r.kv.req_pool_idx: RequestState(r.rid, "coding", 0.022, NOW, generated=[1]) for r in running}
    ledger = SLOLedger(0.020, SLOStats(CLASSES, ServerMetrics("m", registry)))
    pacer = PrefillPacer(AdaServeConfig(), LearnedCosts(LATENCY), ledger, states, ALONE)
    return Forecaster(pacer, ledger, CLASSES)


def load(running: list[Request], waiting: list[Request], *, slots: int = 64, started: Any = None) -> Load:
    return Load(running, started, waiting, slots, most_tokens=256, paced=True)


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def test_an_idle_server(registry: Any) -> None:
    said = forecaster([], registry).renew(load([], []), NOW)
    assert said.admission_open == 1.0
    assert said.classes["coding"].headroom == pytest.approx(22 / 11)
    assert said.classes["chat"].headroom == pytest.approx(40 / 11), "twice the baseline of 20 ms"
    assert said.classes["custom"].headroom is None
    assert all(told.wait_ms == 0 and told.tpot_ms == pytest.approx(11) for told in said.classes.values())
    tpot_s = registry.get_sample_value("adaserve:predicted_tpot_seconds", MODEL | {"slo_class": "chat"})
    assert tpot_s == pytest.approx(0.011)
    assert registry.get_sample_value("adaserve:predicted_headroom", MODEL | {"slo_class": "custom"}) is None


def test_classes_that_wait_alike_are_worked_out_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes with a TPOT SLO, and those without, as none of them states a TTFT."""
    ours, asked, inner = forecaster([], registry), [], Forecaster._wait_s
    monkeypatch.setattr(Forecaster, "_wait_s", lambda self, *more: asked.append(more) or inner(self, *more))
    said = ours.renew(load([], [Request("w")]), NOW)
    assert len(said.classes) == 4 and len(asked) == 2


def test_a_gate_that_closes(registry: Any) -> None:
    """Twelve at 22 ms: 22 ms per iteration now; one more makes 23, which is less than the SLO x 1.1. With 199
    tokens to come they also stand still while its prompt is read, of 256 tokens until one was seen."""
    running = [Request(f"r{i}", i, 0.022) for i in range(12)]
    said = forecaster(running, registry).renew(load(running, []), NOW)
    assert said.admission_open == pytest.approx(0.022 * 199 / (0.023 * 199 + 0.2665) / 1.1)
    assert said.classes["coding"].headroom == pytest.approx(22 / 23)
    assert said.classes["coding"].wait_ms > 1000
    assert registry.get_sample_value("adaserve:admission_open", MODEL) == said.admission_open


def test_prompts_ahead_and_slots(registry: Any) -> None:
    waiting = [Request(f"w{i}", prompt=256) for i in range(3)]
    ours = forecaster([], registry)
    one = ours.renew(load([], waiting[:1]), NOW).classes["chat"].wait_ms
    assert ours.renew(load([], waiting), NOW).classes["chat"].wait_ms == pytest.approx(3 * one)
    many = ours.renew(load([], waiting * 50), NOW).classes["chat"].wait_ms
    assert many == pytest.approx(150 * one, rel=0.02), "prompts that were not looked at count as well"
    assert ours.renew(load([], waiting[1:], started=waiting[0]), NOW).classes["chat"].wait_ms > 0


def test_a_forecast_is_renewed_when_the_server_becomes_idle(registry: Any) -> None:
    running = [Request("r0", 0, 0.022)]
    ours = forecaster(running, registry)
    assert ours.is_due(True, NOW)
    ours.renew(load(running, []), NOW)
    assert not ours.is_due(False, NOW + 0.9) and ours.is_due(False, NOW + 1.0)
    assert ours.is_due(True, NOW + 0.1)


def test_a_prediction_is_kept_for_its_request(registry: Any) -> None:
    running = [Request("r0", 0, 0.022)]
    ours = forecaster(running, registry)
    arriving = Request("r1", 1, 0.022)
    ours.arrived(arriving, load(running, [Request("w")]))
    assert ours._ledger._predicted_s[arriving] == pytest.approx((0.013, 0.013)), "three will decode together"

"""The metrics of a real server, as dashboards and alerts read them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import yaml

from adaserve.loadgen.server_metrics import parse_metrics
from adaserve.server import ServerProcess
from adaserve.slo.classes import SLOConfig
from tests.clients.conftest import MODEL, Counts

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


def complete(server: ServerProcess, slo_class: str) -> None:
    body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-slo-class": slo_class}, timeout=120
    )
    assert answer.status_code == 200, answer.text


def test_dashboards_and_alerts_ask_for_metrics_that_exist(server: ServerProcess) -> None:
    for name in ("coding", "chat", "summarization"):
        complete(server, name)
    samples = parse_metrics(httpx.get(server.url + "/metrics", timeout=30).text)
    exported = {name for name, _ in samples}
    asked = (GRAFANA / "dashboards" / "adaserve.json").read_text()
    rules = (GRAFANA / "prometheus" / "rules.yml").read_text()
    recorded = {r["record"] for g in yaml.safe_load(rules)["groups"] for r in g["rules"] if "record" in r}
    wanted = set(re.findall(r"\b(?:adaserve|sglang):[a-z_]+", asked + rules))
    wanted -= {name for name in wanted if any(r.startswith(name) for r in recorded)}
    assert len(wanted) > 20
    assert wanted <= exported, wanted - exported
    has: dict[str, set[str]] = {}
    for name, labels in samples:
        has.setdefault(name, {"instance", "priority"}).update(dict(labels))  # which others add to it
    for name, selector in re.findall(r"\b((?:adaserve|sglang):[a-z_]+){([^}]*)}", asked + rules):
        assert set(re.findall(r"(\w+)!?=", selector)) <= has[name], (name, selector)
    models = {dict(labels).get("model_name") for name, labels in samples if name.startswith("adaserve:")}
    assert models == {
        dict(labels)["model_name"] for name, labels in samples if name == "sglang:num_queue_reqs"
    }
    classes = {dict(labels)["slo_class"] for _, labels in samples if "slo_class" in dict(labels)}
    assert {"coding", "chat", "summarization"} <= classes <= set(SLOConfig().labels)


def test_a_client_that_leaves_is_nobodys_miss(server: ServerProcess, counted: Counts) -> None:
    body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 6000, "stream": True, "ignore_eos": True}
    headers = {"x-slo-tpot-ms": "0.1", "x-adaserve-speculation": "off"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120
    ) as stream:
        assert next(stream.iter_lines()).startswith("data:")
    end = time.monotonic() + 60
    while (
        httpx.post(f"{server.url}/flush_cache", timeout=30).status_code != 200
    ):  # only an idle server flushes
        assert time.monotonic() < end, "the server still runs a request whose client left"
        time.sleep(0.2)
    assert counted() == {}
    complete(server, "chat")
    assert counted() == {"chat": 1}

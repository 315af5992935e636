"""Configurations for routers and autoscalers: nothing in them names what does not exist."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from adaserve.config import AdaServeConfig
from adaserve.refusals import refuse_unsupported
from adaserve.slo.classes import SLOConfig
from adaserve.slo.forecast_types import ClassForecast, Forecast
from adaserve.slo.prometheus import ServerMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
FLEET = DEPLOY / "fleet"


def read(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((FLEET / name).read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def published() -> dict[str, set[str]]:
    """Names of our metrics, and the labels of each."""
    registry = CollectorRegistry()
    metrics = ServerMetrics("m", registry)
    metrics.start({name: 0.9 for name in SLOConfig().labels})
    metrics.forecast(Forecast(1.0, {"chat": ClassForecast(20.0, 1.5, 0.0)}))
    names: dict[str, set[str]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    rules = yaml.safe_load((DEPLOY / "grafana/prometheus/rules.yml").read_text())["groups"]
    recorded = {
        rule["record"]: {"instance"} for group in rules for rule in group["rules"] if "record" in rule
    }
    return names | recorded


@pytest.mark.parametrize("name", sorted(path.name for path in FLEET.glob("*.yaml")))
def test_metrics_that_are_named_exist(name: str, published: dict[str, set[str]]) -> None:
    text = (FLEET / name).read_text()
    assert read(name)
    for metric, selector in re.findall(r"(?<![-\w])(adaserve:[a-z_:]*[a-z_])(?:\{(\w+)=)?", text):
        assert metric in published, metric
        assert not selector or selector in published[metric]
    sglangs = Path(metrics_collector.__file__).read_text()
    for metric in re.findall(r"sglang:\w+", text):
        assert f'"{metric}"' in sglangs, metric


def test_llm_d_refers_to_plugins_and_attributes_that_are_there() -> None:
    config = read("llm-d.yaml")
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in config["plugins"]}
    (source,) = config["dataLayer"]["sources"]
    (profile,) = config["schedulingProfiles"]
    used = [source, *source["extractors"], *profile["plugins"]]
    assert {u["pluginRef"] for u in used} | {"single-profile-handler"} == plugins.keys()
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    attributes = {metric["attributeKey"] for metric in engine["customMetrics"]}
    read_by = [plugins[name]["parameters"] for name in ("keeps-its-slo", "most-headroom", "shortest-wait")]
    assert {p.get("attribute", p.get("attributeKey")) for p in read_by} <= attributes


def test_dynamo_starts_what_adaserve_serves() -> None:
    """ADASERVE refuses some of SGLang's settings, and Dynamo would start its workers again for ever."""
    words = read("dynamo.yaml")["spec"]["services"]["decode"]["extraPodSpec"]["mainContainer"]["args"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    refuse_unsupported(parser.parse_args(words), AdaServeConfig())


def test_keda_and_the_hpa_scale_alike() -> None:
    keda, hpa = read("keda.yaml")["spec"], read("hpa.yaml")["spec"]
    (trigger,), (metric,) = keda["triggers"], hpa["metrics"]
    assert (
        metric["external"]["target"]["averageValue"]
        == f"{float(trigger['metadata']['threshold']) * 1e3:.0f}m"
    )
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]


def test_envoy_follows_its_schema() -> None:
    """With the messages that Envoy's configuration is made of: pip install xds-protos."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    pytest.importorskip("envoy.config.bootstrap.v3.bootstrap_pb2", reason="needs xds-protos")
    from importlib import import_module

    network, http = "envoy.extensions.filters.network", "envoy.extensions.filters.http"
    policy = "envoy.extensions.load_balancing_policies.client_side_weighted_round_robin.v3"
    for module in (
        f"{network}.http_connection_manager.v3.http_connection_manager_pb2",
        f"{http}.router.v3.router_pb2",
        f"{policy}.client_side_weighted_round_robin_pb2",
    ):
        import_module(module)
    bootstrap = import_module("envoy.config.bootstrap.v3.bootstrap_pb2").Bootstrap()
    json_format.ParseDict(read("envoy.yaml"), bootstrap)
    (cluster,) = bootstrap.static_resources.clusters
    assert len(cluster.load_balancing_policy.policies) == 1


def test_envoy_ends_no_answer_for_being_long() -> None:
    """Without an idle_timeout of its own a route has that of its listener, which is five minutes: an answer
    that is sent whole, or waits in a queue, would end there with 408."""
    (listener,) = read("envoy.yaml")["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert (route["route"]["timeout"], route["route"]["idle_timeout"]) == ("0s", "0s")


@pytest.mark.parametrize("file", ["systemd/adaserve.service", "container/Containerfile"])
def test_what_is_compiled_outlives_a_restart(file: str) -> None:
    """numba keeps it beside the code or below XDG_CACHE_HOME otherwise, where such a server cannot write."""
    settings = dict(re.findall(r"(\w+)=(/\S+)", (DEPLOY / file).read_text()))
    kept = Path(settings["XDG_CACHE_HOME"], "adaserve")
    assert Path(settings["NUMBA_CACHE_DIR"]).is_relative_to(kept)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_start_ends_when_its_server_has_ended() -> None:
    """systemd starts a server again only when the command that waits for its health has ended."""
    unit = (DEPLOY / "systemd" / "adaserve.service").read_text()
    (line,) = re.findall("^ExecStartPost=(.*)$", unit, re.MULTILINE)
    command = shlex.split(line)
    url = {"ADASERVE_HEALTH_URL": "http://127.0.0.1:9/health"}
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    waiting = subprocess.run(
        command, env={**os.environ, **url, "MAINPID": str(ended.pid)}, timeout=60, check=False
    )
    assert waiting.returncode == 1
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        env = {**os.environ, **url, "MAINPID": str(server.pid)}
        with subprocess.Popen(command, env=env, start_new_session=True) as still:
            with pytest.raises(subprocess.TimeoutExpired):
                still.wait(timeout=2.5)
            server.communicate()
            assert still.wait(timeout=60) == 1

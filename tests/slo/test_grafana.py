"""Every query of the dashboard and the alert rules, evaluated by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaserve.host.ports import free_port

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "adaserve.json"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="Prometheus is not installed")

EXPORTER = """
import random, sys, time
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.events import FinishedRequest, IterationSample
from adaserve.slo.forecast_types import ClassForecast, Forecast
from adaserve.slo.stats import SLOStats
from adaserve.slo.classes import SLO, SLOConfig
registry = CollectorRegistry()
stats = SLOStats(SLOConfig(), ServerMetrics("m", registry))
for name in ("num_running_reqs", "num_queue_reqs"):
    gauge = Gauge("sglang:" + name, name, ["priority"], registry=registry)
    for priority, count in (("", 3), ("1", 2), ("2", 1)):  # as with --enable-priority-scheduling
        gauge.labels(priority).set(count)
Gauge("sglang:token_usage", "share", registry=registry).set(0.5)
server, _ = start_http_server(0, "127.0.0.1", registry)
print(server.server_port, flush=True)
rng = random.Random(1)
end = time.time() + 300
while time.time() < end:
    for name, slo in (("coding", 0.036), ("chat", 0.05), ("summarization", 0.15)):
        failed = rng.random() < 0.05
        stats.finish(FinishedRequest(SLO(name, slo, 9.0), 0.2, slo * rng.uniform(0.5, 1.3), 40, slo, failed))
    stats.came(routed=True, stated=False)
    classes = {name: ClassForecast(20.0, 1.5, 0.0) for name in ("coding", "chat", "summarization")}
    stats.forecast(Forecast(1.0, classes))
    times = {"draft_s": 0.004, "select_s": 0.0002, "verify_s": 0.02, "total_s": 0.03}
    stats.iteration(IterationSample(8, 3, 2, 24, 20, 18, 14, 15.0, **times, queue=1, kv_use=0.4))
    time.sleep(0.05)
"""


def queries() -> list[tuple[str, str]]:
    """(panel, query) with Grafana's variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "10s")
            expr = expr.replace("$instance", ".*").replace("$slo_class", ".*")
            # The sample is seconds long, not hours.
            found.append((panel["title"], re.sub(r"\[(5m|1h)\]", "[10s]", expr)))
    return found


def test_dashboard_is_portable_and_current() -> None:
    data = json.loads(DASHBOARD.read_text())
    built = subprocess.run(
        [
            sys.executable,
            "-c",
            "import build_dashboard, json; print(json.dumps(build_dashboard.dashboard()))",
        ],
        cwd=GRAFANA,
        capture_output=True,
        text=True,
        check=True,
    )
    assert data == json.loads(built.stdout), "run deploy/grafana/build_dashboard.py"
    assert data["id"] is None
    uids = {t["datasource"]["uid"] for p in data["panels"] for t in p.get("targets", [])}
    assert uids == {"${datasource}"}
    ids = [p["id"] for p in data["panels"]]
    assert len(ids) == len(set(ids)) and len(queries()) > 20
    boxes = [p["gridPos"] for p in data["panels"]]
    for a in boxes:
        overlap = [b for b in boxes if b is not a and _overlap(a, b)]
        assert not overlap and a["x"] + a["w"] <= 24


CORE_PANELS = {"row", "stat", "timeseries"}  # ship with Grafana: no plugin to install
UNITS = {"percentunit", "short", "s", "reqps"}  # ids of Grafana's formats; others show as a suffix
OPTIONS = {
    "stat": {
        "reduceOptions",
        "colorMode",
        "graphMode",
        "textMode",
        "orientation",
        "justifyMode",
        "wideLayout",
    },
    "timeseries": {"legend", "tooltip"},
}


def test_dashboard_follows_grafanas_model() -> None:
    """What Grafana would drop or ignore without a word: unknown panels, units, options, variables."""
    data = json.loads(DASHBOARD.read_text())
    assert data["schemaVersion"] >= 36 and re.fullmatch(r"[\w-]{1,40}", data["uid"])
    variables = {v["name"]: v for v in data["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    )
    source = {"type": "prometheus", "uid": "${datasource}"}
    for name, variable in variables.items():
        assert name == "datasource" or (variable["type"], variable["datasource"]) == ("query", source)
    assert "$model_name" in variables["instance"]["definition"], "who chooses a model sees its servers alone"
    builtin = {"__rate_interval", "__all"}
    for panel in data["panels"]:
        assert panel["type"] in CORE_PANELS
        if panel["type"] == "row":
            assert panel["panels"] == [] and not panel["collapsed"]
            continue
        assert panel["datasource"] == source and panel["description"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS or defaults["unit"].startswith("suffix:")
        assert set(panel["options"]) <= OPTIONS[panel["type"]]
        letters = [t["refId"] for t in panel["targets"]]
        assert letters == sorted(set(letters)) and all(len(r) == 1 for r in letters)
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= set(variables) | builtin, used
            assert target["datasource"] == source
            # A label that is asked for in the legend must survive the query's grouping.
            for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", target.get("legendFormat", "")):
                assert label in target["expr"], (panel["title"], label)


def test_provisioning_names_what_the_compose_file_mounts() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    mounts = [v.split(":")[1] for v in services["grafana"]["volumes"]]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/adaserve.yaml").read_text())["providers"]
    assert provider["options"]["path"] in mounts and "/etc/grafana/provisioning" in mounts
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["isDefault"] and source["url"].split("/")[2].split(":")[0] in services


def _overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return not (
        a["x"] + a["w"] <= b["x"]
        or b["x"] + b["w"] <= a["x"]
        or a["y"] + a["h"] <= b["y"]
        or b["y"] + b["h"] <= a["y"]
    )


def test_images_are_pinned_and_files_exist() -> None:
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (GRAFANA / source).exists()
    for path in GRAFANA.glob("provisioning/*/*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


@needs_prometheus
def test_rules_and_their_unit_tests() -> None:
    assert PROMTOOL is not None
    folder = GRAFANA / "prometheus"
    for args in (["check", "config", "prometheus.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run([PROMTOOL, *args], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes a process with our metrics."""
    assert PROMETHEUS is not None
    folder = tmp_path_factory.mktemp("prometheus")
    exporter = subprocess.Popen([sys.executable, "-c", EXPORTER], stdout=subprocess.PIPE, text=True)
    assert exporter.stdout is not None
    target = f"127.0.0.1:{int(exporter.stdout.readline())}"
    shipped = yaml.safe_load((GRAFANA / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    jobs = [shipped[0] | {"static_configs": [{"targets": [target]}]}]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    server = subprocess.Popen([PROMETHEUS, *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_samples(url)
        yield url
    finally:
        for process in (server, exporter):
            process.terminate()
            process.wait(10)


def _wait_for_samples(url: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            result = ask(url, "count_over_time(adaserve:iterations_total[1m]) > 8")
            if result:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError("Prometheus got no samples")


def ask(url: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}") as response:
        result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return result


@needs_prometheus
@pytest.mark.parametrize(("panel", "query"), queries(), ids=lambda v: v[:40])
def test_every_query_has_a_result(prometheus: str, panel: str, query: str) -> None:
    result = ask(prometheus, query)
    assert result, f"{panel}: nothing for {query}"
    assert all(r["value"][1] != "NaN" for r in result)


@needs_prometheus
def test_requests_are_counted_once_whatever_their_priority(prometheus: str) -> None:
    found = [ask(prometheus, query) for panel, query in queries() if panel == "Requests"]
    assert [float(result[0]["value"][1]) for result in found] == [3.0, 3.0]


@needs_prometheus
def test_attainment_is_what_was_sent(prometheus: str) -> None:
    query = dict(queries())["Attainment, 5 min"]
    got = {r["metric"]["slo_class"]: float(r["value"][1]) for r in ask(prometheus, query)}
    # TPOT uniform in [0.5, 1.3] x SLO, 5% failures: (0.5 / 0.8) x 0.95 = 0.594.
    assert {"coding", "chat", "summarization"} <= set(got)
    assert all(0.4 < got[c] < 0.75 for c in ("coding", "chat", "summarization"))

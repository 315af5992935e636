"""Writes dashboards/adaserve.json: ``python deploy/grafana/build_dashboard.py``.

A dashboard is mostly repetition; here each panel is one line of what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_MODEL = 'model_name=~"$model_name"'
"""In the query for servers: by these, panels are restricted to the model."""
ALL = 'instance=~"$instance", slo_class=~"$slo_class"'
RATE = "[$__rate_interval]"
TARGET = f"max by (slo_class) (adaserve:slo_target{{{ALL}}})"
OUT = Path(__file__).with_name("dashboards") / "adaserve.json"


def by_class(metric: str, more: str = "") -> str:
    return f"sum by (slo_class) (rate({metric}{{{ALL}{more}}}{RATE}))"


def attainment(window: str, objective: str = "all") -> str:
    requests = f'adaserve:slo_requests_total{{{ALL}, objective="{objective}"'
    met = f'sum by (slo_class) (rate({requests}, outcome="met"}}[{window}]))'
    return f"{met} / (sum by (slo_class) (rate({requests}}}[{window}])) > 0)"


def quantile_of(metric: str, quantile: float) -> str:
    buckets = f"sum by (le, slo_class) (rate({metric}_bucket{{{ALL}}}{RATE}))"
    return f"histogram_quantile({quantile}, {buckets}) >= 0"  # drops the NaN of idle classes


def mean(metric: str) -> str:
    """Mean of a histogram's samples."""
    at = f'{{instance=~"$instance"}}{RATE}'
    return f"sum(rate({metric}_sum{at})) / (sum(rate({metric}_count{at})) > 0)"


def total(metric: str) -> str:
    return f'sum(rate({metric}{{instance=~"$instance"}}{RATE}))'


def foreseen(metric: str) -> str:
    """What one more request would get, by replica and class."""
    return f"{metric}{{{ALL}}}"


def load(across: str) -> str:
    """Predicted TPOT / SLO of the class that fares worst, by replica, then over the replicas."""
    headroom = foreseen("adaserve:predicted_headroom")
    return f"{across} (max by (instance) (1 / {headroom}))"


def close(share: str) -> str:
    """Predictions within 15% of what was delivered."""
    bucket = f'adaserve:predicted_tpot_error_bucket{{{ALL}, le="{share}"}}'
    return f"sum(rate({bucket}{RATE}))"


def burn(window: str) -> str:
    return f"(1 - {attainment(window)}) / on (slo_class) (1 - {TARGET})"


def targets(queries: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"datasource": SOURCE, "expr": expr, "legendFormat": name, "refId": chr(ord("A") + k)}
        for k, (name, expr) in enumerate(queries.items())
    ]


def panel(
    title: str,
    kind: str,
    queries: dict[str, str],
    *,
    unit: str = "short",
    text: str = "",
    steps: list[tuple[float | None, str]] | None = None,
    low: float | None = 0,
    high: float | None = None,
    dashed: str | None = None,
    stack: bool = False,
) -> dict[str, Any]:
    """One panel. ``steps``: thresholds (from, color); ``dashed``: series names that are targets."""
    custom: dict[str, Any] = {}
    if kind == "timeseries":
        custom = {"lineWidth": 2, "fillOpacity": 25 if stack else 8, "showPoints": "never", "spanNulls": True}
        custom["stacking"] = {"mode": "normal" if stack else "none", "group": "A"}
        if steps:
            custom["thresholdsStyle"] = {"mode": "dashed"}
    defaults: dict[str, Any] = {"unit": unit, "min": low, "custom": custom}
    if high is not None:
        defaults["max"] = high
    colors = steps or [(None, "text")]
    defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": v, "color": c} for v, c in colors]}
    overrides = []
    if dashed:
        properties = [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 6]}}]
        overrides.append({"matcher": {"id": "byRegexp", "options": dashed}, "properties": properties})
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi"},
    }
    if kind == "stat":
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "title": title,
        "type": kind,
        "description": text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
        "targets": targets(queries),
    }


ACCEPT = f"{total('adaserve:emitted_tokens_total')} / ({total('adaserve:decoded_rows_total')} > 0)"
PHASES = (
    f'sum by (phase) (rate(adaserve:iteration_seconds_total{{instance=~"$instance"}}{RATE}))'
    f" / on () group_left () ({total('adaserve:iterations_total')} > 0)"
)
GOOD = [(None, "red"), (0.8, "orange"), (0.9, "green")]
ONE = [(None, "green"), (1.0, "red")]

ROWS: list[tuple[str, int, list[dict[str, Any]]]] = [
    (
        "Who got the speed they asked for",
        8,
        [
            panel(
                "Attainment, 5 min",
                "stat",
                {"{{slo_class}}": attainment("5m")},
                unit="percentunit",
                steps=GOOD,
                text="Share of requests that met all their SLOs, failures included. Green from 90%.",
            ),
            panel(
                "Attainment against target",
                "timeseries",
                {
                    "{{slo_class}}": attainment("5m"),
                    "target {{slo_class}}": TARGET,
                },
                unit="percentunit",
                high=1,
                dashed="target.*",
                text="Requests that met all their SLOs / all requests; failures are misses.",
            ),
            panel(
                "Burn rate",
                "timeseries",
                {"{{slo_class}} 5 min": burn("5m"), "{{slo_class}} 1 h": burn("1h")},
                steps=ONE,
                text="(1 - attainment) / (1 - target): 1 uses up the error budget exactly.",
            ),
        ],
    ),
    (
        "Speed",
        8,
        [
            panel(
                "TPOT / SLO",
                "timeseries",
                {
                    f"{{{{slo_class}}}} p{q}": quantile_of("adaserve:slo_tpot_ratio", q / 100)
                    for q in (50, 99)
                },
                steps=ONE,
                text="Below 1 is in time.",
            ),
            panel(
                "Time to first token",
                "timeseries",
                {f"{{{{slo_class}}}} p{q}": quantile_of("adaserve:ttft_seconds", q / 100) for q in (50, 99)},
                unit="s",
                text="From the arrival of a request to its first token: what a better TPOT may cost.",
            ),
            panel(
                "Goodput and throughput",
                "timeseries",
                {
                    "goodput {{slo_class}}": by_class("adaserve:goodput_tokens_total"),
                    "throughput, all classes": f"sum(rate(adaserve:output_tokens_total{{{ALL}}}{RATE}))",
                },
                unit="suffix: tok/s",
                text="Tokens/s of requests that met their SLOs, against all tokens.",
            ),
        ],
    ),
    (
        "What TPOT costs in TTFT",
        7,
        [
            panel(
                "Attainment by objective, 5 min",
                "timeseries",
                {
                    "{{slo_class}} TPOT": attainment("5m", "tpot"),
                    "{{slo_class}} TTFT": attainment("5m", "ttft"),
                },
                unit="percentunit",
                high=1,
                text="Requests that met the one objective, of those that state it.",
            ),
            panel(
                "Prompts at the gate",
                "timeseries",
                {"{{slo_class}}": f"sum by (slo_class) (adaserve:gated_prompts{{{ALL}}})"},
                stack=True,
                text="They wait because one more request would make a running one miss its TPOT SLO.",
            ),
            panel(
                "Longest wait at the gate",
                "timeseries",
                {"{{slo_class}}": f"max by (slo_class) (adaserve:gated_longest_seconds{{{ALL}}})"},
                unit="s",
                text="How long the oldest prompt has waited since it arrived.",
            ),
        ],
    ),
    (
        "Load",
        7,
        [
            panel(
                "Requests",
                "timeseries",
                {
                    # With priorities SGLang has series of each beside this one of all.
                    "running": 'sum(sglang:num_running_reqs{instance=~"$instance", priority=""})',
                    "queued": 'sum(sglang:num_queue_reqs{instance=~"$instance", priority=""})',
                },
                text="Requests that decode, and requests that wait for their prefill.",
            ),
            panel(
                "Requests by class",
                "timeseries",
                {"{{slo_class}}": by_class("adaserve:slo_requests_total", ', objective="all"')},
                unit="reqps",
                stack=True,
                text="Finished requests per second.",
            ),
            panel(
                "KV cache in use",
                "timeseries",
                {"{{instance}}": 'sglang:token_usage{instance=~"$instance"}'},
                unit="percentunit",
                high=1,
                text="Share of the KV cache slots; near 1 requests are retracted or wait.",
            ),
        ],
    ),
    (
        "Speculation",
        7,
        [
            panel(
                "Accept length",
                "timeseries",
                {"tokens per request and iteration": ACCEPT},
                text="Tokens per request and iteration, the bonus token included; 1 is plain decoding.",
            ),
            panel(
                "Drafted, verified, emitted",
                "timeseries",
                {name: total(f"adaserve:{name}_tokens_total") for name in ("drafted", "verified", "emitted")},
                text="Tokens/s.",
            ),
            panel(
                "Depth and width",
                "timeseries",
                {"depth d": mean("adaserve:tree_depth"), "width w": mean("adaserve:tree_width")},
                text="Means of d and w of the candidate trees; d = 0 drafts nothing.",
            ),
            panel(
                "Budget",
                "timeseries",
                {
                    "budget B": mean("adaserve:token_budget"),
                    "tokens verified": mean("adaserve:verify_batch_tokens"),
                },
                text="Tokens that a verification may hold, and those that it held.",
            ),
        ],
    ),
    (
        "Fleet: what one more request would get",
        7,
        [
            panel(
                "Headroom by replica",
                "timeseries",
                {"{{instance}} {{slo_class}}": foreseen("adaserve:predicted_headroom")},
                steps=ONE,
                text="TPOT SLO / predicted TPOT; below 1 the next request of the class would miss its SLO.",
            ),
            panel(
                "Wait by replica",
                "timeseries",
                {"{{instance}} {{slo_class}}": foreseen("adaserve:predicted_wait_seconds")},
                unit="s",
                text="Predicted time until the prefill of the next request starts.",
            ),
            panel(
                "Load of the fleet",
                "timeseries",
                {"mean": load("avg"), "fullest replica": load("max"), "emptiest replica": load("min")},
                steps=ONE,
                text="Predicted TPOT / SLO of the class that fares worst; autoscaling follows the mean.",
            ),
            panel(
                "Predictions within 15%",
                "timeseries",
                {
                    "share": f"({close('0.15')} - {close('-0.15')}) / "
                    f"(sum(rate(adaserve:predicted_tpot_error_count{{{ALL}}}{RATE})) > 0)"
                },
                unit="percentunit",
                high=1,
                text="Share of requests of which the TPOT that was predicted at their arrival is within 15% "
                "of what was delivered.",
            ),
            panel(
                "Requests through routers",
                "timeseries",
                {
                    "{{slo_stated}}": "sum by (slo_stated) (rate(adaserve:requests_total"
                    f'{{instance=~"$instance", through="router"}}{RATE}))'
                },
                unit="reqps",
                text="By whether they stated an SLO. Many without one: the router may drop the headers.",
            ),
        ],
    ),
    (
        "Cost",
        7,
        [
            panel(
                "Time of an iteration",
                "timeseries",
                {"{{phase}}": PHASES},
                unit="s",
                stack=True,
                text="Seconds of a decode iteration by phase.",
            ),
            panel(
                "Calibration error",
                "timeseries",
                {"{{instance}}": 'adaserve:calibration_error{instance=~"$instance"}'},
                unit="percentunit",
                low=None,
                text="Expected / emitted tokens - 1: how honest the acceptance estimates are.",
            ),
        ],
    ),
]


def variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, height, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        width = 24 // len(row)
        for k, item in enumerate(row):
            panels.append(item | {"gridPos": {"x": k * width, "y": y, "w": width, "h": height}})
        y += height
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "id": None,
        "uid": "adaserve",
        "title": "AdaServe: SLOs",
        "tags": ["adaserve", "sglang", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model_name", "label_values(adaserve:iterations_total, model_name)", "Model"),
                variable(
                    "instance", f"label_values(adaserve:iterations_total{{{OF_MODEL}}}, instance)", "Server"
                ),
                variable("slo_class", "label_values(adaserve:slo_target, slo_class)", "Class"),
            ]
        },
        "panels": [p | {"id": k + 1} for k, p in enumerate(panels)],
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")

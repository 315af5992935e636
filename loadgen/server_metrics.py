"""What the server itself counted during a run, from its Prometheus endpoint (if it has one)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.plain_http import ERRORS, open_url

REQUESTS = "adaserve:slo_requests_total"
DRAFT_ACCEPTED = "adaserve:draft_accepted"
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parse_metrics(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Prometheus text format -> {(name, labels): value}; samples with equal labels are added up.
    Raises ValueError."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        key = (sample.name, frozenset(sample.labels.items()))
        samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def scrape(server: Endpoint) -> Samples:
    """The server's metrics now; empty when it has none."""
    try:
        with open_url(server, "/metrics", 5) as response:
            return parse_metrics(response.read().decode("utf-8", "replace"))
    except ERRORS:
        return {}


def server_side(before: Samples, after: Samples) -> dict[str, Any] | None:
    """Attainment per class as the server counted it between two scrapes; None without counters, or if the
    first scrape failed. A server that was started anew in between has counted from 0."""
    counts: dict[str, dict[str, dict[str, float]]] = {}
    if not before:  # what the server has counted since its start is not this run's
        return None
    if any(after.get(key, 0.0) < value for key, value in before.items() if key[0] == REQUESTS):
        before = {}
    for (name, labels), value in after.items():
        if name != REQUESTS:
            continue
        label = dict(labels)
        grew = value - before.get((name, labels), 0.0)
        by_objective = counts.setdefault(label.get("slo_class", ""), {})
        outcomes = by_objective.setdefault(label.get("objective", ""), {})
        outcomes[label.get("outcome", "")] = outcomes.get(label.get("outcome", ""), 0.0) + grew
    if not counts:
        return None
    return {name: _attainment(by_objective) for name, by_objective in sorted(counts.items())}


def learning(after: Samples) -> dict[str, dict[str, float]] | None:
    """Class -> draft ("present", "first") -> accepted tokens of a chain of 4; None if no draft learns."""
    found: dict[str, dict[str, float]] = {}
    for (name, labels), value in after.items():
        if name == DRAFT_ACCEPTED:
            label = dict(labels)
            found.setdefault(label.get("slo_class", ""), {})[label.get("draft", "")] = value
    return found or None


def _attainment(by_objective: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for objective, outcomes in sorted(by_objective.items()):
        total = sum(outcomes.values())
        result[objective] = {
            "requests": int(total),
            "attainment": round(outcomes.get("met", 0.0) / total, 6) if total else None,
        }
    return result

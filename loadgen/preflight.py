"""What must be known before a run: whether the server is there, its model, and its speed when idle."""

from __future__ import annotations

import contextlib
import json
import math
import ssl
import statistics
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adaserve.loadgen import protocol
from adaserve.loadgen.config import BenchConfig, Endpoint
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.plain_http import ERRORS, open_url
from adaserve.loadgen.prompts import load_prompts
from adaserve.loadgen.schedule import (
    PlannedRequest,
    build_schedule,
    class_counts,
    schedule_before_baseline,
)
from adaserve.slo.classes import to_ms

_PROBE_TOKENS = 24
_TIMEOUT_S = 60.0


def preflight(config: BenchConfig) -> BenchConfig:
    """Checks configuration and server, and fills in what the configuration leaves open: the model's name, the
    baseline latency (from the server, else measured), characters per token, usage in every chunk.

    Raises LoadgenError with one sentence when the run cannot work."""
    planned = schedule_before_baseline(config)  # bad input is reported before the server is asked anything
    server = config.server.changed(model=_model(config.server))
    config = config.changed(server=server)
    if config.baseline_ms is None and planned.needs_baseline:
        config = config.changed(baseline_ms=server_baseline_ms(server) or measured_baseline_ms(config))
    if config.server.continuous_usage is None:
        config = config.changed(server=server.changed(continuous_usage=_continuous_usage(config)))
    config = config.changed(chars_per_token={**_probe_classes(config), **config.chars_per_token})
    if not class_counts(planned.requests).keys() <= config.classes.keys():
        _probe_classes_of_the_trace(config)
    return config


def get_json(server: Endpoint, path: str) -> Any:
    """GET and parse. Raises ERRORS."""
    with open_url(server, path, _TIMEOUT_S) as response:
        return json.load(response)


def _model(server: Endpoint) -> str | None:
    try:
        listed = _listed(get_json(server, "/v1/models"))
    except urllib.error.HTTPError as e:
        if e.code in (401, 403):
            raise LoadgenError(
                f"{server.url} wants authentication ({e.code}): give the key, for example with --api-key"
            ) from e
        return server.model  # a server without a model list
    except ERRORS as e:
        reason = getattr(e, "reason", e)
        remedy = "start it (for example `adaserve serve`) or give its address with --url"
        if isinstance(reason, ssl.SSLCertVerificationError):
            reason = reason.verify_message
            remedy = "accept its certificate with insecure: true under server: in the configuration"
        raise LoadgenError(
            f"no OpenAI-compatible server answers at {server.url} ({_one_line(reason)}): {remedy}"
        ) from e
    if server.model is None:
        return listed[0] if listed else None
    if listed and server.model not in listed and server.api != "generate":
        raise LoadgenError(f"the server has no model {server.model!r}: it serves {', '.join(listed)}")
    return server.model


def _listed(data: Any) -> list[str]:
    """The models' names out of a server's list. Raises ValueError for anything else."""
    try:
        return [str(m["id"]) for m in data["data"]]
    except (KeyError, TypeError):
        raise ValueError("its answer to /v1/models is not a list of models") from None


def server_baseline_ms(server: Endpoint) -> float | None:
    """The baseline latency that an AdaServe server measured; None from other servers."""
    try:
        value = get_json(server, "/slo/snapshot.json").get("baseline_ms")
    except (*ERRORS, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


def measured_baseline_ms(config: BenchConfig) -> float:
    """Time per token of single requests, median of three: (E2E of n tokens - E2E of 1) / (n - 1).

    On a server that speculates this is faster than plain decoding; give the baseline then."""
    text = load_prompts(config.prompts).get("chat", 30, "baseline")
    samples = []
    for _ in range(3):
        one_s, n1 = _timed(config.server, text, 1)
        many_s, n2 = _timed(config.server, text, _PROBE_TOKENS)
        if n2 > n1:
            samples.append((many_s - one_s) / (n2 - n1) * 1e3)
    if not samples or statistics.median(samples) <= 0:
        raise LoadgenError("could not measure the baseline latency of the server: give it with --baseline-ms")
    return round(statistics.median(samples), 3)


def _timed(server: Endpoint, text: str, n_tokens: int) -> tuple[float, int]:
    start = time.perf_counter()
    data = _post(server.changed(ignore_eos=server.api == "generate"), _planned(text, n_tokens), {})
    return time.perf_counter() - start, _usage(data, "completion_tokens")


def _probe_classes(config: BenchConfig) -> dict[str, float]:
    """One short request per class, with its SLO headers: refused classes show before the run, and
    the server's token count shows how long this tokenizer's tokens are. Returns chars per token."""
    store = load_prompts(config.prompts)
    slo_config = config.slo_config()
    ratios: dict[str, float] = {}
    for c in config.classes.values():
        category = c.category or c.name
        text = store.get(category, 100, f"probe/{category}")
        slo = slo_config.get(c.name).slo(config.baseline_s)
        planned = replace(
            _planned(text, 1),
            slo_class=c.name,
            tpot_ms=to_ms(slo.tpot_s),
            ttft_ms=to_ms(slo.ttft_s),
        )
        data = _post(config.server, planned, protocol.slo_headers(config.server, planned))
        tokens = _usage(data, "prompt_tokens")
        if tokens > 0:
            ratios[category] = round(len(text) / tokens, 3)
    return ratios


def _probe_classes_of_the_trace(config: BenchConfig) -> None:
    """One short request for each class that only the trace names: refused now, not one after the other."""
    requests = build_schedule(config).requests
    first = {r.slo_class: r for r in reversed(requests) if r.slo_class not in config.classes}
    for name, r in first.items():
        planned = replace(_planned("Hello", 1), slo_class=name, tpot_ms=r.tpot_ms, ttft_ms=r.ttft_ms)
        _post(config.server, planned, protocol.slo_headers(config.server, planned))


def _continuous_usage(config: BenchConfig) -> bool:
    """Whether the server sends usage with every chunk when asked (SGLang, vLLM)."""
    server = config.server.changed(continuous_usage=True)
    if server.api == "generate":
        return False  # it always does
    planned = _planned("Hello", 2)
    try:
        with _open(server, planned, {}, stream=True) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    if data.get("choices") and data.get("usage"):
                        return True
    except ERRORS:
        return False  # what else it means shows with the next request
    return False


def _planned(text: str, n_tokens: int) -> PlannedRequest:
    return PlannedRequest(0, 0.0, "default", None, None, text, 0, n_tokens)


def _open(server: Endpoint, planned: PlannedRequest, headers: Mapping[str, str], stream: bool) -> Any:
    data = protocol.body(server, planned, "")
    if not stream:
        data["stream"] = False
        data.pop("stream_options", None)
    headers = {"Content-Type": "application/json", **headers}
    return open_url(server, protocol.PATHS[server.api], server.timeout_s, json.dumps(data).encode(), headers)


def _post(server: Endpoint, planned: PlannedRequest, headers: Mapping[str, str]) -> Any:
    try:
        with _open(server, planned, headers, stream=False) as response:
            return json.load(response)
    except urllib.error.HTTPError as e:
        text = e.reason
        with contextlib.suppress(*ERRORS):
            text = e.read().decode("utf-8", "replace")
            text = protocol.error_text(json.loads(text))
        raise LoadgenError(
            f"the server refuses a request of class {planned.slo_class!r} with {e.code}: {_one_line(text)}"
        ) from e
    except ERRORS as e:
        raise LoadgenError(
            f"a first request to {server.url} failed ({_one_line(e)}): see the server's log"
        ) from e


def _usage(data: Any, key: str) -> int:
    source = data[0] if isinstance(data, list) and data else data
    usage = source.get("usage") or source.get("meta_info") if isinstance(source, dict) else None
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0


def _one_line(reason: object) -> str:
    """What went wrong, in one line; some errors have several lines, some only their name."""
    if isinstance(reason, json.JSONDecodeError):
        return "its answer is not JSON"
    return " ".join(str(reason).split())[:300] or type(reason).__name__

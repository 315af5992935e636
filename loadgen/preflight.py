"""What must be known before a run: whether the server is there, its model, and its speed when idle."""

from __future__ import annotations

import contextlib
import json
import math
import ssl
import statistics
import time
import urllib.error
from collections.abc import Iterator, Mapping
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
    server, chars_per_token = _probe_classes(config)
    config = config.changed(server=server, chars_per_token={**chars_per_token, **config.chars_per_token})
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
    data = _post(server.changed(ignore_eos=server.api == "generate"), _planned(text, n_tokens))
    return time.perf_counter() - start, _usage(data, "completion_tokens")


def _probe_classes(config: BenchConfig) -> tuple[Endpoint, dict[str, float]]:
    """One short request per class, as the run will send it: refused classes show before the run, and
    the server's token count shows how long this tokenizer's tokens are. Returns the server, with what its
    answers said of its usage, and characters per token."""
    store = load_prompts(config.prompts)
    slo_config = config.slo_config()
    server = config.server
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
        server, tokens = _probe(server, planned)
        if tokens > 0:
            ratios[category] = round(len(text) / tokens, 3)
    return server, ratios


def _probe_classes_of_the_trace(config: BenchConfig) -> None:
    """One short request for each class that only the trace names: refused now, not one after the other."""
    requests = build_schedule(config).requests
    first = {r.slo_class: r for r in reversed(requests) if r.slo_class not in config.classes}
    for name, r in first.items():
        planned = replace(_planned("Hello", 1), slo_class=name, tpot_ms=r.tpot_ms, ttft_ms=r.ttft_ms)
        _probe(config.server, planned)


def _probe(server: Endpoint, planned: PlannedRequest) -> tuple[Endpoint, int]:
    """Sends a request as the run does. Returns its prompt tokens and the server, of which is then known
    whether it sends usage with every chunk when asked (SGLang, vLLM).

    That takes no request of its own, because a server counts each one that it gets."""
    if server.continuous_usage is not None:
        return server, _streamed(server, planned)[0]
    if server.api == "generate":  # it always does
        return _probe(server.changed(continuous_usage=False), planned)
    try:
        tokens, in_chunks = _streamed(server.changed(continuous_usage=True), planned)
    except LoadgenError:  # what else it means shows with the next request
        return _probe(server.changed(continuous_usage=False), planned)
    return server.changed(continuous_usage=in_chunks), tokens


def _streamed(server: Endpoint, planned: PlannedRequest) -> tuple[int, bool]:
    """Prompt tokens of one streamed request, 0 if the server does not tell, and whether a chunk with
    text told tokens."""
    tokens, events, in_chunks = 0, 0, False
    headers = protocol.slo_headers(server, planned)
    with _refusals(server, planned), _open(server, protocol.body(server, planned, ""), headers) as response:
        for line in response:
            payload = line.removeprefix(b"data:").strip()
            if payload == line.strip() or payload == b"[DONE]":
                continue
            events += 1
            try:
                data = json.loads(payload)
                event = protocol.parse_event(server.api, data, 0)
            except protocol.NOT_UNDERSTOOD:
                continue  # the run reports for each request what was not understood
            if event.error is not None:
                raise LoadgenError(f"{_refuses(planned)}: {_one_line(event.error)}")
            tokens = event.prompt_tokens or tokens
            in_chunks = in_chunks or (bool(data.get("choices")) and event.output_tokens is not None)
        if not events:
            raise ValueError("its answer is not a stream of events")
    return tokens, in_chunks


def _planned(text: str, n_tokens: int) -> PlannedRequest:
    return PlannedRequest(0, 0.0, "default", None, None, text, 0, n_tokens)


def _open(server: Endpoint, data: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    headers = {"Content-Type": "application/json", **headers}
    return open_url(server, protocol.PATHS[server.api], server.timeout_s, json.dumps(data).encode(), headers)


def _post(server: Endpoint, planned: PlannedRequest) -> Any:
    data = {**protocol.body(server, planned, ""), "stream": False}
    data.pop("stream_options", None)
    with _refusals(server, planned), _open(server, data, {}) as response:
        return json.load(response)


@contextlib.contextmanager
def _refusals(server: Endpoint, planned: PlannedRequest) -> Iterator[None]:
    """Says in one sentence why a request failed. Raises LoadgenError."""
    try:
        yield
    except LoadgenError:
        raise
    except urllib.error.HTTPError as e:
        text = e.reason
        with contextlib.suppress(*ERRORS):
            text = e.read().decode("utf-8", "replace")
            text = protocol.error_text(json.loads(text))
        raise LoadgenError(f"{_refuses(planned)} with {e.code}: {_one_line(text)}") from e
    except ERRORS as e:
        raise LoadgenError(
            f"a first request to {server.url} failed ({_one_line(e)}): see the server's log"
        ) from e


def _refuses(planned: PlannedRequest) -> str:
    return f"the server refuses a request of class {planned.slo_class!r}"


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

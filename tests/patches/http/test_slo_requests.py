"""From an HTTP request to what the scheduler is told: each SLO is resolved once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput

from adaserve.boundary.limits import MAX_BATCH
from adaserve.config import ENV, AdaServeConfig, slo_classes
from adaserve.patches.http import slo_requests
from adaserve.patches.http.slo_requests import _any_request, _native_request, _response
from adaserve.patches.http.validation import asks_for_health
from adaserve.slo.classes import SLOError
from adaserve.slo.resolve import START_PARAMS, START_TEXT, WIRE_KEY, RequestSLO

CLASSES = """
default_class: chat
classes:
  coding: {x_baseline: 1.2}
  chat: {tpot_ms: 50, ttft_ms: 2000}
"""


@pytest.fixture(autouse=True)
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "slo.yaml"
    path.write_text(CLASSES)
    monkeypatch.setenv(ENV, AdaServeConfig(slo_config=str(path)).to_json())
    slo_classes.cache_clear()
    yield
    slo_classes.cache_clear()


def http(body: dict[str, Any] | None = None, **headers: str) -> Request:
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    request = Request({"type": "http", "path": "/generate", "headers": pairs, "state": {}})
    request._json = body or {}
    return request


def told(params: dict[str, Any]) -> RequestSLO:
    return RequestSLO.from_params(params["custom_params"])


def generate(obj: GenerateReqInput, request: Request) -> Any:
    """Both hooks as SGLang calls them: the route first, then the tokenizer manager."""

    async def manager(obj: Any, request: Any) -> None:
        _any_request(None, obj, request)

    return asyncio.run(_native_request(manager, obj, request))


def test_headers_are_read_once_for_all_requests_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3,000 headers it would take 5 ms for each of them, in the loop that answers everybody."""
    calls: list[int] = []
    read = slo_requests.read_headers
    monkeypatch.setattr(slo_requests, "read_headers", lambda *a: calls.append(1) or read(*a))
    obj = GenerateReqInput(text=["a", "b"], sampling_params=[{"custom_params": {"slo_class": "coding"}}, {}])
    generate(obj, http(x_slo_ttft_ms="700", user_agent="curl/8"))
    assert len(calls) == 1
    assert [told(p) for p in obj.sampling_params] == [
        RequestSLO("custom", ttft_s=0.7, x_baseline=1.2, stated=True),
        RequestSLO("custom", tpot_s=0.05, ttft_s=0.7, stated=True),
    ]


@pytest.mark.parametrize(
    ("text", "changes", "is_counted"),
    [
        (START_TEXT, {}, False),
        ([START_TEXT] * 2, {}, False),  # two ranks
        (START_TEXT, {"max_new_tokens": 9}, True),
        ([START_TEXT, "a"], {}, True),
        ("a", {}, True),
        (None, {}, True),
    ],
)
def test_the_request_with_which_sglang_starts_is_not_counted(
    text: Any, changes: dict[str, Any], is_counted: bool
) -> None:
    for headers, expected in (({}, is_counted), ({"x_slo_class": "coding"}, True)):
        obj = GenerateReqInput(text=text, sampling_params={**START_PARAMS, **changes})
        generate(obj, http(**headers))
        assert told(obj.sampling_params).counted == expected


def test_what_the_boundary_refuses_is_not_resolved() -> None:
    params: list[dict[str, Any]] = [{}] * (MAX_BATCH + 1)
    obj = GenerateReqInput(text="a", sampling_params=params)
    generate(obj, http())
    assert obj.sampling_params is params


def test_a_ttft_alone_leaves_the_default_classs_tpot() -> None:
    obj = GenerateReqInput(text="a")
    generate(obj, http(x_slo_ttft_ms="700"))
    assert told(obj.sampling_params).at(None).tpot_s == 0.05


def test_nvext_of_the_body_is_read() -> None:
    obj = GenerateReqInput(text="a")
    generate(obj, http({"text": "a", "nvext": {"router": {"itl_target": 63.7}}}))
    assert told(obj.sampling_params).tpot_s == 63.7 / 1e3
    bad = http({"text": "a", "nvext": {"router": {"itl_target": "fast"}}})
    answer = generate(GenerateReqInput(text="a"), bad)
    assert answer.status_code == 400 and b"nvext.router.itl_target is 'fast'" in answer.body


def test_nvext_inside_custom_params_does_not_disagree_with_itself() -> None:
    params = {"custom_params": {"nvext": {"router": {"itl_target": 63.7}}, "mine": 1}}
    obj = GenerateReqInput(text="a", sampling_params=params)
    assert generate(obj, http()) is None
    assert obj.sampling_params["custom_params"].keys() == {"mine", WIRE_KEY}
    assert told(obj.sampling_params).tpot_s == 63.7 / 1e3


def test_a_client_cannot_write_what_we_resolved() -> None:
    forged = {"custom_params": {WIRE_KEY: {"slo_class": "coding", "tpot_s": 1e-9, "tenant": "somebody"}}}
    answer = generate(GenerateReqInput(text="a", sampling_params=forged), http())
    assert answer.status_code == 400 and WIRE_KEY.encode() in answer.body


@pytest.mark.parametrize("prefix", ["", "/v"])
def test_a_health_check_asks_for_no_speed(prefix: str) -> None:
    """What it sends besides must not end the check, or the server looks dead."""
    scope = {"type": "http", "path": f"{prefix}/health", "root_path": prefix, "state": {}}
    request = Request({**scope, "headers": [(b"x-slo-foo", b"1")]})
    obj = GenerateReqInput(input_ids=[1], sampling_params={"max_new_tokens": 1})
    _any_request(None, obj, request)
    assert obj.sampling_params == {"max_new_tokens": 1}
    assert asks_for_health(request)


def test_tenants_are_told_apart_and_their_keys_not_told() -> None:
    def tenant(**headers: str) -> str:
        obj = GenerateReqInput(text="a")
        generate(obj, http(**headers))
        return told(obj.sampling_params).tenant

    mine = tenant(authorization="Bearer secret-1")
    assert tenant() == "anonymous" and "secret" not in mine
    assert mine == tenant(authorization="bearer secret-1") == tenant(x_api_key="secret-1")
    assert mine != tenant(authorization="Bearer secret-2")
    assert tenant(x_api_key="Bearer secret-1") == mine != tenant(x_api_key="other secret-1")


@pytest.mark.parametrize(("body", "priority"), [({"priority": 2}, 2), ({"priority": 0}, 0), ({}, 3)])
def test_a_response_has_the_priority_of_its_body_or_of_the_hint(body: dict[str, Any], priority: int) -> None:
    """SGLang reads the body's, 0 where there is none, and drops it."""
    request, obj = http(body, x_dynamo_request_priority="3"), GenerateReqInput(text="a")
    read = body.get("priority", 0)
    _response(None, "resp_a", "a", obj, {}, None, raw_request=request, priority=read)
    _any_request(None, obj, request)
    assert obj.priority == priority


def test_a_priority_hint_fills_sglangs_field_unless_the_request_did() -> None:
    hints = {"nvext": {"agent_hints": {"priority": 7}}}
    obj = GenerateReqInput(text="a")
    generate(obj, http(hints))
    assert obj.priority == 7
    obj = GenerateReqInput(text="a", priority=2)
    generate(obj, http(hints, x_dynamo_request_priority="3"))
    assert obj.priority == 2
    unlike = [{"custom_params": {"nvext": {"agent_hints": {"priority": p}}}} for p in (1, 2)]
    answer = generate(GenerateReqInput(text=["a", "b"], sampling_params=unlike), http())
    assert answer.status_code == 400 and b"share one priority" in answer.body


def test_a_response_in_the_background_is_refused_while_it_has_a_status() -> None:
    """SGLang makes it after it has answered with 200."""
    wrong, right = http(x_slo_class="nobody"), http(x_slo_class="chat")
    _response(None, "resp_a", "a", GenerateReqInput(text="a"), raw_request=wrong)
    _response(None, "resp_a", "a", GenerateReqInput(text="a", background=True), raw_request=right)
    with pytest.raises(SLOError, match="unknown SLO class 'nobody'"):
        _response(None, "resp_a", "a", GenerateReqInput(text="a", background=True), raw_request=wrong)

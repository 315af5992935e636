"""What each API is sent, and what is read in an event of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.protocol import MAX_COUNT, NOT_UNDERSTOOD, body, parse_event, slo_headers
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.slo.classes import SLOConfig
from adaserve.slo.resolve import resolve


@pytest.mark.parametrize(
    "odd", [None, 5, {"slo": 5}, {"slo": {"met": "yes"}}, {"slo": {"met": True, "tpot_ms": "x"}}]
)
def test_metadata_of_other_servers_is_no_verdict(odd: Any) -> None:
    event = parse_event("completions", {"choices": [], "usage": {"completion_tokens": 3}, "metadata": odd}, 0)
    assert event.server_slo is None and event.output_tokens == 3


def test_verdict_of_the_server_is_read() -> None:
    slo = {
        "class": "chat",
        "tpot_ms": 1.5,
        "tpot_slo_ms": 2,
        "ttft_ms": 9.0,
        "ttft_slo_ms": None,
        "met": True,
    }
    expected = {k: v for k, v in slo.items() if k != "class"}
    stream = {"choices": [], "usage": {"completion_tokens": 3}, "metadata": {"slo": slo}}
    assert parse_event("chat", stream, 0).server_slo == expected
    assert parse_event("generate", {"text": "x", "meta_info": {"slo": slo}}, 0).server_slo == expected
    slo["tpot_predicted_ms"] = 1.7
    assert parse_event("chat", stream, 0).server_slo == expected | {"tpot_predicted_ms": 1.7}
    slo["tpot_predicted_ms"] = "soon"
    assert parse_event("chat", stream, 0).server_slo is None


@pytest.mark.parametrize(
    ("tokens", "verifications", "length"), [(9, 4, 2.0), (1, 0, None), (9, None, None), (None, 4, None)]
)
def test_the_first_token_comes_of_no_verification(
    tokens: int | None, verifications: int | None, length: float | None
) -> None:
    meta = {"completion_tokens": tokens, "spec_verify_ct": verifications}
    assert parse_event("generate", {"text": "x", "meta_info": meta}, 0).accept_length == length


@pytest.mark.parametrize("count", [-1, MAX_COUNT + 1, 2.5, "3"])
@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens"])
def test_a_number_of_tokens_that_cannot_be_is_refused(name: str, count: Any) -> None:
    with pytest.raises(NOT_UNDERSTOOD):
        parse_event("completions", {"choices": [], "usage": {name: count}}, 0)
    with pytest.raises(NOT_UNDERSTOOD):
        parse_event("generate", {"text": "x", "meta_info": {name: count}}, 0)


STREAMED = {
    "model": "m", "max_tokens": 4, "temperature": 0.5, "stream": True, "ignore_eos": True, "priority": 2,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "custom_params": {"answer_tokens": 3},
}  # fmt: skip


BODIES: dict[str, dict[str, Any]] = {
    "completions": STREAMED | {"prompt": "before hi"},
    "chat": STREAMED | {"messages": [{"role": "user", "content": "before hi"}]},
    "generate": {
        "text": "before hi", "stream": True, "priority": 2,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True,
                            "custom_params": {"answer_tokens": 3}},
    },
}  # fmt: skip


@pytest.mark.parametrize("api", BODIES)
def test_each_api_is_asked_the_same_in_its_own_words(api: str) -> None:
    server = Endpoint(model="m", api=api, ignore_eos=True, continuous_usage=True)
    planned = PlannedRequest(
        0, 0.0, "chat", None, None, "hi", 1, 4, temperature=0.5, priority=2, answer_tokens=3
    )
    assert body(server, planned, "before ") == BODIES[api]
    plain = Endpoint(model="m", api=api, ignore_eos=False, continuous_usage=False)
    bare = body(plain, replace(planned, priority=None), "")
    assert not {"priority", "ignore_eos"} & bare.keys() and "continuous_usage_stats" not in str(bare)


def test_slos_are_sent_in_two_spellings_that_agree() -> None:
    """Routers that drop x-slo headers forward tracestate."""
    planned = PlannedRequest(0, 0.0, "chat", 50.1234567, 2000.0, "hi", 1, 4)
    sent = slo_headers(Endpoint(), planned)
    assert sent["tracestate"] == "adaserve=tpot-ms:50.1235;ttft-ms:2000;class:chat"
    alone = {"tracestate": sent.pop("tracestate"), "user-agent": "x"}
    assert resolve(alone, None, SLOConfig()) == resolve(sent | alone, None, SLOConfig())
    assert "tpot" not in str(slo_headers(Endpoint(slo_headers="class"), planned))
    assert "class" not in str(slo_headers(Endpoint(slo_headers="ms"), planned))
    assert "tracestate" not in slo_headers(Endpoint(slo_headers="none"), planned)
    assert "tracestate" not in slo_headers(Endpoint(headers={"Tracestate": "a=1"}), planned)
    assert "tracestate" not in slo_headers(Endpoint(), replace(planned, slo_class="a,b")), "not of that form"

"""Hostile requests are refused with 400, on every route and streaming or not, and harm nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.engine.attacks import Attack, attacks
from tests.engine.harness import Server
from tests.engine.pairs import VOCAB

# ruff: noqa: E501 - tables read better with one case a line
STREAMING = {
    "/generate", "/v1/completions", "/v1/chat/completions", "/api/chat", "/api/generate", "/v1/responses",
    "/v1/messages",
}  # fmt: skip
LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
PLAIN = {"x-adaserve-speculation": "off"}
"""Makes an answer take longer, so that what is done meanwhile comes before its end."""


def probe(server: Server) -> list[int]:
    """What a good client gets."""
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return list(server.generate(input_ids=[5, 17, 33, 99], sampling_params=params)["output_ids"])


def post(server: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    """As Python writes it, NaN included."""
    content = json.dumps(body).encode()
    return httpx.post(
        server.url + path,
        content=content,
        headers={"content-type": "application/json", **headers},
        timeout=60,
    )


@pytest.fixture(scope="module")
def expected(attacked: Server) -> list[int]:
    return probe(attacked)


@pytest.mark.parametrize("attack", list(attacks()), ids=lambda attack: attack.name)
def test_an_attack_is_refused(attacked: Server, expected: list[int], attack: Attack) -> None:
    for stream in (False, True) if attack.path in STREAMING else (None,):
        body = attack.body if stream is None else {**attack.body, "stream": stream}
        answer = post(attacked, attack.path, body)
        assert answer.status_code == 400, answer.text
        assert attack.words in answer.text
        assert attack.path != "/generate" or attack.words in answer.json()["error"]["message"]


def test_nobody_else_noticed(attacked: Server, expected: list[int]) -> None:
    assert probe(attacked) == expected
    attacked.assert_idle_and_clean()


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_slo_gets_400(attacked: Server, path: str, stream: bool) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
        "/api/generate": {"model": "m", "prompt": "hello"},
        "/generate": {"text": "hello"},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    }
    answer = post(attacked, path, {**bodies[path], "stream": stream}, **{"x-slo-tpot-ms": "-5"})
    assert answer.status_code == 400 and "tpot" in answer.text.lower()


@pytest.mark.parametrize("path", sorted(STREAMING))
def test_what_is_right_is_still_served(attacked: Server, path: str) -> None:
    """Streams start before the response is made, and lose nothing by it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 12}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "the fox", "sampling_params": {"max_new_tokens": 12, "temperature": 0}},
        "/v1/completions": {"model": "m", "prompt": "the fox", "max_tokens": 12, "temperature": 0},
        "/v1/chat/completions": {**chat, "temperature": 0},
        "/v1/messages": {**chat, "temperature": 0},
        "/v1/responses": {"model": "m", "input": "the fox", "max_output_tokens": 20, "temperature": 0},
        "/api/chat": {
            "model": "m",
            "messages": chat["messages"],
            "options": {"num_predict": 12, "temperature": 0, "seed": 5},
        },
        "/api/generate": {
            "model": "m",
            "prompt": "the fox",
            "options": {"num_predict": 12, "temperature": 0, "seed": 5},
        },
    }
    whole = post(attacked, path, {**bodies[path], "stream": False})
    parts = post(attacked, path, {**bodies[path], "stream": True})
    assert whole.status_code == parts.status_code == 200
    assert '"error":{' not in parts.text and "event: error" not in parts.text
    text, streamed = _text(path, whole.json()), _streamed(path, parts.text)
    assert text and streamed == text


@pytest.mark.parametrize("nothing", [None, [], [None], [[]], [[], []]])
def test_media_that_hold_nothing_are_no_media(attacked: Server, nothing: Any) -> None:
    params = [{"max_new_tokens": 4}, {"max_new_tokens": 4}]
    body = {
        "text": ["a", "b"],
        "sampling_params": params,
        "audio_data": nothing,
        "image_data": nothing,
        "modalities": ["x"],
    }
    answer = post(attacked, "/generate", body)
    assert answer.status_code == 200 and len(answer.json()) == 2, answer.text


def _text(path: str, body: dict[str, Any]) -> str:
    picks: dict[str, Any] = {
        "/generate": lambda b: b["text"],
        "/v1/completions": lambda b: b["choices"][0]["text"],
        "/v1/chat/completions": lambda b: b["choices"][0]["message"]["content"],
        "/v1/messages": lambda b: b["content"][0]["text"],
        "/v1/responses": lambda b: b["output"][0]["content"][0]["text"],
        "/api/chat": lambda b: b["message"]["content"],
        "/api/generate": lambda b: b["response"],
    }
    return str(picks[path](body))


def _streamed(path: str, text: str) -> str:
    """The text of a stream: its increments put together, or what its last event holds as a whole."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    picks: dict[str, Any] = {
        "/generate": lambda e: e["text"],
        "/v1/completions": lambda e: e["choices"][0]["text"],
        "/v1/chat/completions": lambda e: e["choices"][0]["delta"].get("content") or "",
        "/v1/messages": lambda e: e["delta"].get("text", "") if e["type"] == "content_block_delta" else "",
        "/v1/responses": lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
        "/api/chat": lambda e: e["message"]["content"],
        "/api/generate": lambda e: e["response"],
    }
    parts = [picks[path](event) for event in events]
    return parts[-1] if path == "/generate" else "".join(parts)


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 1, "top_k": 3}, {"temperature": 1}])
def test_a_request_is_left_a_token_to_choose(attacked: Server, expected: list[int], drawn: Any) -> None:
    """Whatever it forbids; SGLang's draw of the first token raises where there is none."""
    short: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9}
    for params, texts in (
        ({**short, "regex": "(yes|no)"}, {"yes", "no"}),
        ({**short, "regex": "a{0}"}, {""}),
        ({**short, "stop_token_ids": list(range(VOCAB))}, {""}),
    ):
        answer = attacked.generate(input_ids=[5, 6, 7], sampling_params={**params, **drawn})
        assert answer["text"] in texts
    dead = {"ebnf": 'root ::= "a" dead\ndead ::= dead', "max_new_tokens": 9, **drawn}
    answer = post(attacked, "/generate", {"input_ids": [5, 6, 7], "sampling_params": dead})
    assert answer.status_code == 400 and "cannot be completed" in answer.text
    assert probe(attacked) == expected


def processor(body: str) -> str:
    """A custom logit processor as a client sends it: pickled by value, since the server has no such module."""
    space: dict[str, Any] = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    code = f"class Mine(CustomLogitProcessor):\n    def __call__(self, logits, params):\n        {body}"
    exec(code, space)
    return str(space["Mine"].to_str())


@pytest.mark.parametrize(
    "body", ["raise OSError('no')", "return logits[:, :5]", "return logits - float('inf')"]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_logit_processor_that_fails_ends_its_request(
    attacked: Server, expected: list[int], body: str, late: bool
) -> None:
    """In the prefill, where SGLang draws, and where the worker does."""
    if late:
        body = f"if len(params[0]['__req__'].output_ids) < 3: return logits\n        {body}"
    answer = post(
        attacked,
        "/generate",
        {
            "input_ids": [5, 6, 7],
            "custom_logit_processor": processor(body),
            "sampling_params": {"max_new_tokens": 9, "ignore_eos": True},
        },
    )
    assert answer.status_code == 400 and "custom logit processor" in answer.text, answer.text
    assert probe(attacked) == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"), (b"{", "application/json"), (b"[" * 100_000, "application/json"),
        (b'{"text": "a"}', "text/plain"), (b'{"a":' * 100_000, "application/json"), (b"null", "application/json"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "application/json"), (b'"a"', "application/json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/api/chat"])
def test_bodies_that_are_not_requests(attacked: Server, path: str, content: bytes, kind: str) -> None:
    answer = httpx.post(attacked.url + path, content=content, headers={"content-type": kind}, timeout=60)
    assert answer.status_code in (400, 200) if kind == "text/plain" else answer.status_code == 400


def test_a_body_of_the_wrong_shape_gets_400(attacked: Server) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": 512}
    answer = post(attacked, "/v1/chat/completions", body)
    assert answer.status_code == 400 and "response_format must be an object such as" in answer.text


def test_a_request_with_two_lengths_is_answered_at_once(attacked: Server, expected: list[int]) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=30) as connection:
        connection.sendall(head + b'{"a": 1}\n')
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert probe(attacked) == expected


def test_a_huge_body_is_not_read(attacked: Server) -> None:
    huge = b'{"text": "' + b"a" * (33 << 20) + b'"}'
    for content in (huge, iter([huge[i : i + (1 << 20)] for i in range(0, len(huge), 1 << 20)])):
        answer = httpx.post(
            attacked.url + "/generate",
            content=content,
            headers={"content-type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 413


def test_a_session_survives_odd_turns(attacked: Server, expected: list[int]) -> None:
    opened = post(attacked, "/open_session", {"capacity_of_str_len": 1000, "session_id": "odd"})
    assert opened.status_code == 200
    params = {"temperature": 0, "max_new_tokens": 4}
    first = attacked.generate(input_ids=[5, 6], sampling_params=params, session_params={"id": "odd"})
    turn = {"id": "odd", "rid": first["meta_info"]["id"]}
    for odd, status in (
        ({**turn, "offset": 2**31 - 1}, 200), ({**turn, "drop_previous_output": True}, 200),
        ({**turn, "replace": True}, 200), ({**turn, "offset": -(2**31)}, 200), ({"id": "odd", "rid": "nobody"}, 400),
    ):  # fmt: skip
        body = {"input_ids": [7], "sampling_params": params, "session_params": odd}
        assert post(attacked, "/generate", body).status_code == status
    again = post(attacked, "/generate", {**body, "session_params": turn, "rid": turn["rid"]})
    assert again.status_code == 400 and "earlier turn of this session" in again.text
    most = {"logprob_start_len": 0, "top_logprobs_num": VOCAB, "token_ids_logprob": [5] * 1000}
    much = post(attacked, "/generate", {**body, "session_params": turn, "return_logprob": True, **most})
    assert much.status_code == 400 and "a session's prompt" in much.text
    whole = {"id": "odd", "replace": True}  # after which the turns before are gone
    for odd, status in ((whole, 200), (turn, 400)):
        assert post(attacked, "/generate", {**body, "session_params": odd}).status_code == status
    assert post(attacked, "/close_session", {"session_id": "odd"}).status_code == 200
    assert probe(attacked) == expected


def test_a_request_that_cannot_be_taken_in_ends_alone(attacked: Server, expected: list[int]) -> None:
    for stream in (False, True):
        body = {"input_ids": [5, 6], "rid": "cannot be taken in", "stream": stream}
        answer = post(attacked, "/generate", body)
        assert answer.status_code == 500 and "could not accept this request" in answer.text
    assert probe(attacked) == expected
    attacked.assert_idle_and_clean()


async def streams_and_abort(server: Server, rids: list[str], aborted: str) -> dict[str, str]:
    """Runs a long request for each rid, aborts one when all of them run; how each one ended."""
    running = {rid: asyncio.Event() for rid in rids}

    async def one(client: httpx.AsyncClient, rid: str) -> str:
        body = {"input_ids": [5, 6, 7], "sampling_params": LONG, "stream": True, "rid": rid}
        last = ""
        async with client.stream("POST", "/generate", json=body) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    running[rid].set()
                    last = line.removeprefix("data: ")
        reason = json.loads(last)["meta_info"]["finish_reason"]
        return str(reason["type"])

    async with httpx.AsyncClient(base_url=server.url, timeout=300, headers=PLAIN) as client:
        tasks = {rid: asyncio.create_task(one(client, rid)) for rid in rids}
        await asyncio.gather(*(event.wait() for event in running.values()))
        assert (await client.post("/abort_request", json={"rid": aborted})).status_code == 200
        return {rid: await task for rid, task in tasks.items()}


def test_an_abort_ends_nobody_whose_id_only_starts_alike(attacked: Server) -> None:
    ended = asyncio.run(streams_and_abort(attacked, ["long", "longer", "long-2", "other"], "long"))
    assert ended == {"long": "abort", "longer": "length", "long-2": "length", "other": "length"}


async def twice(server: Server) -> list[int]:
    body = {"input_ids": [5, 6, 7], "sampling_params": LONG, "rid": "same"}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, headers=PLAIN) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(3)))
    return sorted(answer.status_code for answer in answers)


def test_an_id_that_is_live_is_refused_and_free_again_afterwards(attacked: Server) -> None:
    assert asyncio.run(twice(attacked)) == [200, 400, 400]
    assert asyncio.run(twice(attacked)) == [200, 400, 400]

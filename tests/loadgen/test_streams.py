"""Streams as servers send them, byte for byte."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adaserve.loadgen import stream
from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.recorder import Recorder
from adaserve.loadgen.results import iter_records
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.slo.run_summary import RequestRecord

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str | None = None, reason: str | None = None, **delta: Any) -> bytes:
    """One event of /v1/completions, or of /v1/chat/completions where there is a ``delta``."""
    said: dict[str, Any] = {"delta": delta} if delta else {"text": text or ""}
    data = {"choices": [{"index": 0, "finish_reason": reason, **said}], "usage": None}
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    """The event without choices that ends a stream."""
    data = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def answered(parts: list[bytes], api: str = "completions", **planned: Any) -> tuple[RequestRecord, str]:
    """What the load generator makes of an answer that comes in these pieces, each in a packet of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = stream.Target(Endpoint(url=f"http://127.0.0.1:{listener.getsockname()[1]}", api=api))

        def serve() -> None:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection, contextlib.suppress(ConnectionError):  # it may have heard enough
                connection.recv(1 << 16)
                for part in parts:
                    time.sleep(0.005)  # the reader takes the last piece first
                    connection.sendall(part)

        server = threading.Thread(target=serve)
        server.start()
        request = PlannedRequest(0, 0.0, "chat", 1000.0, 1000.0, "Hello", 4, 3, **planned)
        answer = stream.send(target, request, "", 0.0, time.perf_counter, lambda _: True)
        server.join()
    assert answer is not None
    return answer.record, answer.text


@dataclass
class Stream:
    """Pieces of an answer's body, and what they amount to."""

    body: list[bytes]
    text: str = "abc"
    tokens: int = 3
    chunks: int = 3
    error: str | None = None
    source: str = "usage"
    api: str = "completions"


ABC = [event("a"), event("b"), event("c", "stop")]
EURO = event("€")
STREAMS = {
    "plain": Stream([*ABC, usage(3), DONE]),
    "CRLF": Stream([e.replace(b"\n", b"\r\n") for e in (*ABC, usage(3), DONE)]),
    "no space after the colon": Stream([e.replace(b"data: ", b"data:") for e in (*ABC, usage(3), DONE)]),
    "comments and other fields": Stream([b": ping\n\n", b"retry: 9\n", *ABC, b":\n\n", usage(3), DONE]),
    "all in one packet": Stream([b"".join([*ABC, usage(3), DONE])]),
    "a character cut in two": Stream(
        [EURO[: EURO.index(b"\xe2") + 1], EURO[EURO.index(b"\xe2") + 1 :], event("", "stop"), usage(2), DONE],
        text="€", tokens=2, chunks=1,
    ),
    "empty chunks": Stream([event(""), event("ab"), event(""), event("c", "stop"), usage(3), DONE], chunks=2),
    "no [DONE]": Stream([*ABC, usage(3)]),
    "something after it": Stream([*ABC, usage(3), DONE, event("d")]),
    "no usage": Stream([*ABC, DONE], source="chunks"),
    "usage of a server that does not count": Stream([*ABC, usage(0), DONE], source="chunks"),
    "reasoning": Stream(
        [event(role="assistant", content=""), event(reasoning_content="a"), event(content="bc"),
         event("", "stop", content=""), usage(3), DONE],
        chunks=2, api="chat",
    ),
    "reasoning, as vLLM names it": Stream(
        [event(role="assistant", content=""), event(reasoning="a"), event(content="bc"),
         event("", "stop", content=""), usage(3), DONE],
        chunks=2, api="chat",
    ),
    "a call of a tool": Stream(
        [event(role="assistant", content=""), event(tool_calls=[{"function": {"name": "a"}}]),
         event(tool_calls=[{"function": {"arguments": "bc"}}]), event("", "stop", content=""), usage(3),
         DONE],
        chunks=2, api="chat",
    ),
    "a call as of old": Stream(
        [event(role="assistant", content=None, function_call={"name": "a", "arguments": ""}),
         event(function_call={"arguments": "bc"}), event("", "function_call", content=""), usage(3), DONE],
        chunks=2, api="chat",
    ),
    "a refusal": Stream(
        [event(refusal="a"), event(refusal="bc"), event("", "stop", content=""), usage(3), DONE],
        chunks=2, api="chat",
    ),
    "nothing but the end of the text": Stream(
        [event("", "stop"), usage(1), DONE], text="", tokens=1, chunks=0
    ),
    "no token": Stream(
        [event("", "stop"), usage(0), DONE],
        text="", tokens=0, chunks=0, source="chunks", error="the answer holds no token",
    ),
    "aborted": Stream(
        [event("a"), event("b", "abort"), usage(2), DONE],
        text="a", tokens=1, chunks=1, source="chunks", error="the server ended the answer: abort",
    ),
    "an error amid": Stream(
        [event("a"), b'event: error\ndata: {"error": {"message": "out of memory"}}\n\n'],
        text="a", tokens=1, chunks=1, source="chunks", error="out of memory",
    ),
    "an error by its name": Stream(
        [event("a"), b'event: error\ndata: {"message": "out of memory"}\n\n'],
        text="a", tokens=1, chunks=1, source="chunks", error="out of memory",
    ),
    "an error in plain text": Stream(
        [event("a"), b"event: error\n: a comment\ndata: out of memory\n\n"],
        text="a", tokens=1, chunks=1, source="chunks", error="out of memory",
    ),
    "other events that have a name": Stream([b"event: message\n" + e for e in (*ABC, usage(3), DONE)]),
    "cut off": Stream(
        [event("a")], text="a", tokens=1, chunks=1, source="chunks",
        error="the stream ended without a finish reason",
    ),
}  # fmt: skip


@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("case", STREAMS)
def test_every_form_of_a_stream_is_read(case: str, chunked: bool) -> None:
    wanted = STREAMS[case]
    parts = [HEAD + b"\r\n", *wanted.body]
    if chunked:
        parts = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
        parts += [b"%x\r\n%s\r\n" % (len(p), p) for p in wanted.body] + [b"0\r\n\r\n"]
    record, text = answered(parts, wanted.api)
    found = (text, record.output_tokens, record.n_chunks, record.error, record.token_source)
    assert found == (wanted.text, wanted.tokens, wanted.chunks, wanted.error, wanted.source)
    assert record.attained == (wanted.error is None)
    assert len(record.itl_ms) == max(0, wanted.chunks - 1), "the end has no text, and is no token's time"


def test_a_client_hangs_up_after_tokens_where_chunks_hold_several() -> None:
    def told(text: str, tokens: int, reason: str | None = None) -> bytes:
        data = {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    counted = [told("a", 4), told("b", 8), told("c", 12), told("d", 16, "stop"), DONE]
    record, text = answered([HEAD + b"\r\n", *counted], disconnect_after=6)
    assert (record.error, text, record.output_tokens) == ("client_disconnect", "ab", 8)
    record, text = answered([HEAD + b"\r\n", *ABC, usage(12), DONE], disconnect_after=2)
    assert (record.error, text) == ("client_disconnect", "ab"), "without usage chunks are all it has"
    record, text = answered([HEAD + b"\r\n", *ABC, usage(12), DONE], disconnect_after=6)
    assert (record.error, text) == (None, "abc"), "the answer was complete before it was counted"


def test_a_server_that_does_not_end_answers_where_their_trace_does_is_found_out() -> None:
    parts = [HEAD + b"\r\n", *ABC, usage(3), DONE]
    assert answered(parts, answer_tokens=3)[0].attained
    record, _ = answered(parts, answer_tokens=2)
    assert "ADASERVE_REPLAY=1" in (record.error or "") and not record.attained


def test_an_error_that_no_file_can_hold_is_recorded_all_the_same(tmp_path: Path) -> None:
    """A request without a record would count neither as met nor as missed."""
    recorder = Recorder(tmp_path, 2)
    for said in (b'{"error": {"message": "not \\ud83d"}}', event("a", "odd").replace(b"odd", b"\\udc00")[6:]):
        record, _ = answered([HEAD + b"\r\n", b"data: " + said + b"\n\n", DONE])
        recorder.add(record)
    recorder.close()
    assert [(r.error, r.finish_reason) for r in iter_records(tmp_path)] == [("not ?", None), (None, "?")]


def test_a_server_that_is_full_says_so() -> None:
    body = b'{"error": {"message": "the queue is full"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n" % len(body)
    record, _ = answered([head + body])
    assert record.error == "HTTP 429: the queue is full" and record.http_status == 429
    assert not record.attained

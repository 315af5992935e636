"""Requests that the measuring commands send themselves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from adaserve.bench.client import Ask, send_in_order

AT_ONCE, REQUESTS = 3, 10


class Answers(ThreadingHTTPServer):
    """Streams two tokens to each request, the second when no more requests can come before it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.log: list[tuple[str, int]] = []
        self.running = self.most_running = 0
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def come(self, number: int) -> None:
        with self.changed:
            self.log.append(("came", number))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.changed.notify_all()

    def may_end(self) -> bool:
        came = sum(what == "came" for what, _ in self.log)
        return self.running == AT_ONCE or came == REQUESTS


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_POST(self) -> None:
        number = int(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
        self.server.come(number)
        self.send_response(500 if number >= REQUESTS else 200)
        self.end_headers()
        self.server.log.append(("first", number))
        self._send([number], number)
        with self.server.changed:
            assert self.server.changed.wait_for(self.server.may_end, 30)
            self.server.running -= 1
        self._send([number, number + 1], number)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, tokens: list[int], number: int) -> None:
        answer = {"output_ids": tokens, "meta_info": {"number": number}}
        self.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_each_request_waits_for_the_first_token_of_the_one_before(server: Answers) -> None:
    replies = send_in_order(server.url, [Ask(str(n), 2) for n in range(REQUESTS)], AT_ONCE)
    assert [r.output_ids for r in replies] == [(n, n + 1) for n in range(REQUESTS)]
    assert [r.meta["number"] for r in replies] == list(range(REQUESTS))
    assert server.log == [(what, n) for n in range(REQUESTS) for what in ("came", "first")]
    assert server.most_running == AT_ONCE


def test_a_request_that_fails_is_an_error(server: Answers) -> None:
    with pytest.raises(httpx.HTTPStatusError):
        send_in_order(server.url, [Ask(str(REQUESTS), 2)], AT_ONCE)

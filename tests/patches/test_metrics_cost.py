"""Collecting metrics takes a share of the HTTP process' time, however often they are asked for."""

from __future__ import annotations

import asyncio
from typing import Any

from adaserve.patches.metrics_cost import Metrics

COLLECTING_S = 0.05


class Asked:
    """An app whose metrics take some time, and what clients got of them."""

    def __init__(self) -> None:
        self.now_s, self.collected, self.headers = 100.0, 0, set[Any]()
        self.metrics = Metrics(self._app, lambda: self.now_s)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.now_s += COLLECTING_S
        self.collected += 1
        self.headers.add(tuple(scope["headers"]))
        assert scope["query_string"] == b""
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.collected})

    def ask(self, **headers: bytes) -> bytes:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "path": "/metrics", "headers": named, "query_string": b"name[]=x"}
        asyncio.run(self.metrics(scope, receive, send))
        return bytes(sent[1]["body"])


def test_a_scraper_gets_new_ones_every_time() -> None:
    asked = Asked()
    for scrape in range(1, 50):
        assert asked.ask() == b"%d" % scrape
        asked.now_s += 1.0


def test_one_that_never_stops_asking_gets_old_ones() -> None:
    asked = Asked()
    start_s, answers = asked.now_s, set()
    while asked.now_s < start_s + 20.0:
        answers.add(asked.ask())
        asked.now_s += 1e-3
    assert 2.8 <= asked.collected * COLLECTING_S <= 3.2, "1 s that was saved up, and a tenth of 20 s"
    assert len(answers) == asked.collected, "they are renewed all the same"


def test_what_is_kept_is_little() -> None:
    asked = Asked()
    for i in range(100):
        asked.ask(accept=b"text/x%d" % i, accept_encoding=b"br;q=0.%d" % i)
        asked.ask(accept=b"application/openmetrics-text;version=1.%d" % i, accept_encoding=b"gzip, x%d" % i)
    assert len(asked.headers) == 2

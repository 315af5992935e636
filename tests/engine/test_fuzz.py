"""Thousands of drawn requests: the server lives, answers a good client as before, and leaks no slot."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

from tests.engine.fuzzing import Answer, Request, Schema, drawn, send
from tests.engine.harness import Server
from tests.engine.test_boundary import probe
from tests.engine.test_prefill import met

AT_ONCE = 32
CHUNK = 1000


@pytest.fixture(scope="module")
def schema(attacked: Server) -> Schema:
    return Schema(httpx.get(attacked.url + "/openapi.json", timeout=60).raise_for_status().json())


LONG_ANSWER = Request(
    "POST",
    "/generate",
    {"input_ids": [5, 17], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}},
)
"""It decodes while others are read."""


def attack(server: Server, requests: list[Request]) -> Counter[int]:
    """Sends them in batches beside a long answer, and asks after each what a good client gets. Answers by
    status."""
    expected = probe(server)
    seen: Counter[int] = Counter()
    for start in range(0, len(requests), AT_ONCE):
        batch = [LONG_ANSWER, *requests[start : start + AT_ONCE]]
        answers = send(server, batch)
        wrong = [
            f"{r}\n    -> {a.status} {a.text[:300]}" for r, a in zip(batch, answers, strict=True) if bad(a)
        ]
        assert not wrong, "\n".join(wrong)
        assert server.alive, "\n".join(map(str, batch)) + server.tail()
        assert probe(server) == expected, "\n".join(map(str, batch)) + server.tail()
        seen.update(a.status for a in answers)
    server.assert_idle_and_clean()
    return seen


def bad(answer: Answer) -> bool:
    """No answer, or one that blames the server; 501 says that something is not offered."""
    return answer.status == 0 or (answer.status >= 500 and answer.status != 501)


def test_drawn_requests_end_nothing(attacked: Server, schema: Schema) -> None:
    seen = attack(attacked, drawn(schema, 400, number=0))
    assert seen[400] > 100, "hardly anything was refused: the fuzzer does not reach the checks"
    assert seen[200] > 20, "hardly anything was served: the fuzzer does not get past the first checks"
    assert met(attacked) > 0, "no prompt was in the forward of a verification"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 21))
def test_twenty_thousand_drawn_requests_end_nothing(attacked: Server, schema: Schema, number: int) -> None:
    seen = attack(attacked, drawn(schema, CHUNK, number))
    assert seen[400] > CHUNK / 4 and seen[200] > CHUNK / 20, seen

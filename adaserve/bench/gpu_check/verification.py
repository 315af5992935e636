"""What one verification costs on the device, and one plain decoding of as many tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adaserve.server import ServerError, ServerProcess

LOOK_EVERY_S = 0.02
MAX_ROUNDS = 5
"""Answers of small models may be there before the server was asked twice."""


def target_ms(server: ServerProcess, generate: Callable[[], Any], tokens: int) -> tuple[float, int]:
    """Mean device time of the target in the iterations that verified exactly ``tokens``, roots included, in
    ms, and how many these were, while ``generate`` waits for its answers.

    Requests begin and end one after the other, so that a mean over all iterations would be one over smaller
    batches. The server is asked how far it is again and again; what lies between two answers counts where
    every iteration was full. Where none was, answers are asked for again. Raises ServerError in the end.
    """
    for _ in range(MAX_ROUNDS):
        seconds, iterations = _full(server, generate, tokens)
        if iterations:
            return seconds / iterations * 1e3, iterations
    raise ServerError(f"no iteration was seen that verified {tokens} tokens: give more --tokens")


def _full(server: ServerProcess, generate: Callable[[], Any], tokens: int) -> tuple[float, int]:
    """Seconds of the target in full iterations that were seen, and how many."""
    seconds, iterations = 0.0, 0
    before, is_over = _sums(server.report()), False
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate)
        while not is_over:
            time.sleep(LOOK_EVERY_S)
            is_over = answers.done()  # and what came since the last look counts all the same
            now = _sums(server.report())
            count, verified, spent_s = (b - a for a, b in zip(before, now, strict=True))
            if count > 0 and verified == tokens * count:
                seconds, iterations = seconds + spent_s, iterations + int(count)
            before = now
        answers.result()
    return seconds, iterations


def _sums(report: dict[str, Any]) -> tuple[float, float, float]:
    """Since the start: decode iterations, tokens that they verified, seconds of the target."""
    # Of the last five minutes. What is forgotten meanwhile makes a stretch look less than full.
    verified = sum(bucket["sums"].get("verify_tokens", 0.0) for bucket in report["stats"]["buckets"])
    return report["times"]["iterations"], verified, report["times"]["target_s"]

"""What the worker does between iterations."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from adaserve.engine.times import Times
from adaserve.engine.worker import AdaServeWorker


def test_a_prefill_is_queued_behind_an_iteration_that_runs() -> None:
    """Its outcome is read after that, and waiting for it is not the prefill's time."""
    order: list[str] = []
    told: list[float] = []

    def forward(batch: Any) -> Any:
        order.append("forward")
        return SimpleNamespace(next_token_ids=torch.zeros(0, dtype=torch.int32))

    def settle() -> None:
        order.append("settle")
        time.sleep(0.05)
        worker.loop.times.last_end_s = time.perf_counter()

    worker: Any = SimpleNamespace(
        target_worker=SimpleNamespace(forward_batch_generation=forward),
        loop=SimpleNamespace(settle=settle, times=Times(), sources=[]),
        ledger=SimpleNamespace(prefilled=lambda reqs, seconds: told.append(seconds)),
        prefill=SimpleNamespace(observe_prefill=lambda tokens, seconds: told.append(seconds)),
        _start_requests=lambda batch, tokens: None,
    )
    batch = SimpleNamespace(reqs=[], sampling_info=None, seq_lens=torch.zeros(0), extend_num_tokens=0)
    AdaServeWorker._prefill(worker, batch, None)
    assert order == ["forward", "settle"]
    assert max(told) < 0.05 and worker.loop.times.report()["prefill_s"] < 0.05

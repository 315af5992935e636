"""One forward of a model over ragged token trees: the only place where devices differ."""

from __future__ import annotations

import time
from typing import Any, Protocol, cast

import torch

from adaserve.engine.host.beam import BeamArrays, KeepGoing
from adaserve.engine.host.forward import LeanModel
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.host.install import LEAN_ATTRIBUTE
from adaserve.engine.host.sglang_forward import SGLangForward
from adaserve.engine.trees.plan import TreeAttentionPlan

FirstForward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, TreeAttentionPlan]
"""Arguments of ``TreeForward.hidden``."""


class TreeForward(Protocol):
    """Runs T tokens through a model, writes their KV, and gives logits or draft candidates."""

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: TreeAttentionPlan
    ) -> torch.Tensor:
        """Opaque states [T, ...] of ``tokens`` (int64 [T]) at ``positions``; their KV goes to ``slots``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab] of some rows of ``hidden``."""
        ...

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy token of each row, int64 [rows]."""
        ...

    def topk_logprobs(
        self, hidden: torch.Tensor, reading: Reading, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best ``width`` tokens of softmax(logits as ``reading`` says): fp32 log-probabilities, int64 ids."""
        ...


class BeamForward(Protocol):
    """A ``TreeForward`` that makes all levels of the candidate trees in one call, where it can."""

    searches_beams: bool

    def beam_search(self, first: FirstForward, beams: BeamArrays, keep: KeepGoing | None) -> int:
        """Runs ``first``, which ends in the roots, and the levels below; returns how many were made."""
        ...


class LeanForward:
    """CPU hosts: our own forward straight on the KV pool, without SGLang's per-forward bookkeeping."""

    def __init__(self, model: LeanModel, runner: Any) -> None:
        self._model = model
        self._pool = runner.token_to_kv_pool
        self.searches_beams = model.searches_beams

    def beam_search(self, first: FirstForward, beams: BeamArrays, keep: KeepGoing | None) -> int:
        return self._model.beam_search(
            *first[:3], self._pool.k_buffer, self._pool.v_buffer, first[3], beams, keep
        )

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: TreeAttentionPlan
    ) -> torch.Tensor:
        return self._model.forward(tokens, positions, slots, self._pool.k_buffer, self._pool.v_buffer, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.argmax(hidden)

    def topk_logprobs(
        self, hidden: torch.Tensor, reading: Reading, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.topk_logprobs(hidden, reading, width)


class TimedForward:
    """Adds up the seconds spent in the model, so that all the rest can be told apart."""

    def __init__(self, inner: TreeForward) -> None:
        self._inner = inner
        self.busy_s = 0.0
        self.searches_beams: bool = getattr(inner, "searches_beams", False)

    def beam_search(self, first: FirstForward, beams: BeamArrays, keep: KeepGoing | None) -> int:
        start_s = time.perf_counter()
        steps = cast("BeamForward", self._inner).beam_search(first, beams, keep)
        self.busy_s += time.perf_counter() - start_s
        return steps

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: TreeAttentionPlan
    ) -> torch.Tensor:
        start_s = time.perf_counter()
        out = self._inner.hidden(tokens, positions, slots, plan)
        self.busy_s += time.perf_counter() - start_s
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        out = self._inner.logits(hidden)
        self.busy_s += time.perf_counter() - start_s
        return out

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        out = self._inner.argmax(hidden)
        self.busy_s += time.perf_counter() - start_s
        return out

    def topk_logprobs(
        self, hidden: torch.Tensor, reading: Reading, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start_s = time.perf_counter()
        out = self._inner.topk_logprobs(hidden, reading, width)
        self.busy_s += time.perf_counter() - start_s
        return out


MEASURED_ATTRIBUTE = "adaserve_tree_forward"
"""Set on a ``ModelRunner`` by the device worker, which brings forwards of its own."""


def tree_forward(worker: Any) -> TreeForward:
    """The forward of the model that a ``TpModelWorker`` holds."""
    runner = worker.model_runner
    if (own := getattr(runner, MEASURED_ATTRIBUTE, None)) is not None:
        return own
    lean = getattr(runner.model, LEAN_ATTRIBUTE, None)
    return SGLangForward(runner) if lean is None else LeanForward(lean, runner)

"""A model's forwards on a CPU host: our own kernels, or SGLang's for models that they do not cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.beam_levels import Levels
from adaserve.engine.cpu.beam_arrays import MAX_WIDTH, BeamArrays
from adaserve.engine.cpu.install import llama_of
from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.cpu.noise import best_of
from adaserve.engine.cpu.params import Before, Inputs
from adaserve.engine.cpu.sglang_forward import SGLangForward
from adaserve.engine.device import Beams, KeepGoing, Ready, Run, Search
from adaserve.engine.device_timing import HostMark
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.rotary_shift import RotaryShift
from adaserve.engine.trees.attention import (
    TreeAttentionPlan,
    attention_plan,
    gather_slots,
    indptr,
    token_slots,
    verification_plan,
)
from adaserve.engine.trees.batch import TreeBatch, without_gap


class CpuModel(Protocol):
    """A model over its KV pool, which is given slots and attention layout."""

    def hidden(self, inputs: Inputs) -> Tensor:
        """Opaque states [T, ...] of the tokens, whose KV is written."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] of some rows of ``hidden``."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor:
        """Greedy token of each row, int64 [rows]."""
        ...

    def topk_logprobs(self, hidden: Tensor, transform: LogitTransform, width: int) -> tuple[Tensor, Tensor]:
        """Best ``width`` tokens of softmax(logits as ``transform`` says): fp32 log-probabilities, int64
        ids."""
        ...


class LlamaForward:
    """Our own forward straight on the KV pool, without SGLang's bookkeeping."""

    def __init__(self, model: LlamaModel, pool: Any) -> None:
        self.model, self.pool = model, pool
        self.logits, self.argmax, self.topk_logprobs = model.logits, model.argmax, model.topk_logprobs

    def hidden(self, inputs: Inputs) -> Tensor:
        return self.model.forward(inputs, self.pool.k_buffer, self.pool.v_buffer)


class CpuForward:
    """``ModelForward`` on a CPU: a call returns only when its work is done."""

    most_tokens = 2048
    first_tokens = None
    follows = False
    was_graph = False

    def __init__(self, model: CpuModel, req_to_token: Tensor, shift: RotaryShift | None = None) -> None:
        self.model, self.shift = model, shift
        self._req_to_token = req_to_token
        self._runs: list[Run] = []

    @property
    def storage(self) -> str:
        """How the weights are stored; "sglang" where SGLang's own forward runs."""
        return self.model.model.held.stored if isinstance(self.model, LlamaForward) else "sglang"

    def fill(self, batch: TreeBatch) -> None:
        """Never called: no call of this device leaves anything to wait for."""

    def run(self, batch: TreeBatch) -> Tensor:
        plan = verification_plan(self._req_to_token, batch)
        return self._hidden(self._inputs(batch, plan, self._before(batch)))

    @property
    def most_beside(self) -> int:
        """0 where SGLang's own forward runs, which would make the logits of every token."""
        return self.most_tokens if isinstance(self.model, LlamaForward) else 0

    def run_beside(self, batch: TreeBatch, texts: TreeBatch) -> Tensor:
        assert isinstance(self.model, LlamaForward)
        table = self._req_to_token
        plan = verification_plan(table, batch).beside(attention_plan(table, texts))
        states = self._hidden(both(self._inputs(batch, plan, None), self._inputs(texts, plan, None)))
        self.model.model.read = states[len(batch) :]
        return states[: len(batch)]

    def forget_read(self) -> None:
        if isinstance(self.model, LlamaForward):
            self.model.model.read = None

    def feed(self, batch: TreeBatch) -> None:
        self.run(batch)

    def _before(self, batch: TreeBatch) -> Before | None:
        """Additional inputs for the tokens of a text: none, except for heads."""
        return None

    def _before_level(self, states: Tensor, levels: Levels, step: int) -> Before | None:
        """The same for the beams of depth ``step`` - 1, ``states`` being those of the beams before them."""
        return None

    def _inputs(self, batch: TreeBatch, plan: TreeAttentionPlan, before: Before | None) -> Inputs:
        slots, positions = token_slots(self._req_to_token, batch), torch.from_numpy(batch.positions)
        if self.shift is not None:
            positions = positions + self.shift.by_row[batch.pool_rows[batch.row]]
        return Inputs(torch.from_numpy(batch.tokens), positions, slots, plan, before)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """What is done inside is one of ``take_runs``."""
        start = HostMark()
        yield
        self._runs.append((start, HostMark()))

    def _hidden(self, inputs: Inputs) -> Tensor:
        with self._timed():
            return self.model.hidden(inputs)

    def logits(self, states: Tensor) -> Tensor:
        with self._timed():
            return self.model.logits(states)

    def argmax(self, states: Tensor) -> Tensor:
        with self._timed():
            return self.model.argmax(states)

    def rehearse(self, batch: TreeBatch, width: int) -> int:
        self._best(self.run(batch), LogitTransform.plain(np.ones(len(batch))), width)
        return 1

    def _best(
        self,
        states: Tensor,
        transform: LogitTransform,
        width: int,
        forbid: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        with self._timed():
            if forbid is None:
                return self.model.topk_logprobs(states, transform, width)
            return best_of(self.model.logits(states), transform, width, forbid)

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """All levels in one call of our kernels where they can, else level by level."""
        shape, model = search.shape, self.model
        fits = not shape.is_branching and shape.beams[0] <= MAX_WIDTH and search.forbid is None
        if fits and isinstance(model, LlamaForward) and (native := model.model.native) is not None:
            beams = self._native(native, model.pool, first, search, keep)
        else:
            beams = self._walk(first, search, keep)
        return Ready(lambda: beams)

    def _native(
        self, native: NativeBackend, pool: Any, first: TreeBatch, search: Search, keep: KeepGoing | None
    ) -> Beams:
        width = search.shape.beams[0]
        kv_lens = without_gap(search.base + search.shape.width, first.gap)
        kv_slots = gather_slots(self._req_to_token, search.pool_rows, kv_lens, first.gap)
        # One list of slots serves the first forward too, where its keys are the same.
        shared = kv_slots if first.seen is not None else None
        plan = attention_plan(self._req_to_token, first, shared)
        arrays = BeamArrays.of(search, indptr(kv_lens), kv_slots)

        def go_on(step: int) -> bool:
            assert keep is not None
            return keep(step, arrays.logprobs[:, (step - 1) * width : step * width])

        inputs = self._inputs(first, plan, self._before(first))
        asked = None if keep is None else go_on
        with self._timed():
            steps = native.beam_search(inputs, pool.k_buffer, pool.v_buffer, arrays, asked)
        return Beams(arrays.tokens, arrays.parents, arrays.logprobs, steps)

    def _walk(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Beams:
        shape, a = search.shape, len(search.base)
        levels = Levels(shape, a, torch.from_numpy(shape.columns))
        roots = torch.from_numpy(np.cumsum(first.q_lens) - 1)
        forbid = forbidding(search, levels, 1)
        states = self.run(first)[roots]
        logprob, token = self._best(states, search.transform(1, 1), shape.beams[0], forbid)
        levels.start(logprob.double(), token)
        kv_lens = without_gap(search.base + shape.width, first.gap)
        kv_slots = gather_slots(self._req_to_token, search.pool_rows, kv_lens, first.gap)
        for step in range(2, len(shape.beams) + 1):
            if keep is not None and not keep(step - 1, levels.frontier(step - 1)):
                return found(levels, step - 1)
            batch = level_batch(levels, search, step, kv_lens)
            plan = attention_plan(self._req_to_token, batch, kv_slots)
            states = self._hidden(self._inputs(batch, plan, self._before_level(states, levels, step)))
            m = len(batch) // a
            forbid = forbidding(search, levels, step)
            best = self._best(states, search.transform(m, step), levels.children(step), forbid)
            logprob, token = (v.view(a, m, -1) for v in best)
            levels.grow(step, logprob.double(), token)
        return found(levels, len(shape.beams))

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs


def found(levels: Levels, steps: int) -> Beams:
    """After so many draft steps."""
    return Beams(levels.tokens.numpy(), levels.parents.numpy(), levels.logprobs.numpy(), steps)


def forbidding(search: Search, levels: Levels, step: int) -> Callable[[Tensor], None] | None:
    """What sets logits of ``step`` to -inf, where there are grammars."""
    if (asked := search.forbid) is None:
        return None
    before = levels.level(step - 1) if step > 1 else slice(-1, 0)  # the root
    nodes = slice(0, before.stop)
    tokens, parents = levels.tokens[:, nodes].numpy(), levels.parents[:, nodes].numpy()
    return lambda logits: asked(logits, tokens, parents, before.stop - before.start)


def level_batch(levels: Levels, search: Search, step: int, kv_lens: np.ndarray) -> TreeBatch:
    """The beams of depth ``step`` - 1, whose children are wanted."""
    before = levels.level(step - 1)
    a, m = len(search.base), before.stop - before.start
    return TreeBatch(
        tokens=levels.tokens[:, before].flatten().numpy(),
        positions=np.repeat(search.base + step - 1, m),
        places=(search.base[:, None] + levels.shape.columns[before]).ravel(),
        pool_rows=search.pool_rows,
        q_lens=np.full(a, m),
        kv_lens=kv_lens,
        seen=levels.visible[:, before].flatten(0, 1).numpy(),
    )


def both(first: Inputs, then: Inputs) -> Inputs:
    """The tokens of both, with the layout of both, which the first has."""
    tokens, positions, slots = (
        torch.cat((getattr(first, name), getattr(then, name))) for name in ("tokens", "positions", "slots")
    )
    return Inputs(tokens, positions, slots, first.plan)


def cpu_forward(runner: Any, shift: RotaryShift | None = None) -> CpuForward:
    """The forward of the model that a ``ModelRunner`` holds."""
    llama = llama_of(runner.model)
    model = SGLangForward(runner) if llama is None else LlamaForward(llama, runner.token_to_kv_pool)
    return CpuForward(model, runner.req_to_token_pool.req_to_token, shift)

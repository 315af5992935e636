"""One model's tree forwards on a device: static inputs, padded sizes, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from torch import Tensor

from adaserve.engine.clock import mark
from adaserve.engine.device import noise
from adaserve.engine.device.attention import (
    AttentionBuffers,
    MakeKernel,
    TreeAttentionBackend,
    TreeKernel,
)
from adaserve.engine.device.graphs import GraphTable
from adaserve.engine.device.layout import Extent, gather_slots, seen_by, window_bits
from adaserve.engine.device.sizes import FIRST, Head, Key, Sizes
from adaserve.engine.device.transfer import QueuedCopy, put
from adaserve.engine.parts import Beams, KeepGoing, Ready, Run, Search
from adaserve.engine.reading import Reading
from adaserve.engine.search import Levels
from adaserve.engine.trees.batch import Gap, TreeBatch, without_gap
from adaserve.engine.trees.verify import SCRATCH_SLOT


@dataclass(frozen=True)
class Inputs:
    """Static inputs of the forwards of one model, or the front of them."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    scale: Tensor  # float32 [T]: what the draft's logits are multiplied by at each token
    spread: Tensor  # float32 [T]: and the noise of its request, in noisy forwards
    keys: Tensor  # int64 [T]: of that noise

    @staticmethod
    def allocate(tokens: int, device: torch.device) -> Inputs:
        tokens_, positions, slots, keys = torch.zeros(4, tokens, dtype=torch.int64, device=device)
        scale, spread = torch.ones(tokens, device=device), torch.zeros(tokens, device=device)
        return Inputs(tokens_, positions, slots, scale, spread, keys)

    def front(self, tokens: int) -> Inputs:
        return Inputs(*(getattr(self, f.name)[:tokens] for f in fields(self)))


class ModelCall(Protocol):
    """Runs a model on static inputs. Two exist: SGLang's models, and tiny ones in tests."""

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Tensor:
        """Logits [T, vocab] of ``inputs``; their KV goes to ``inputs.slots``."""
        ...


class SGLangCall:
    """Calls the model that a ``ModelRunner`` holds, without its per-forward bookkeeping."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._backend = TreeAttentionBackend(runner)

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Tensor:
        runner, device = self._runner, inputs.tokens.device
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,  # the mode that gives logits of every token
            batch_size=rows,
            input_ids=inputs.tokens,
            req_pool_indices=torch.zeros(rows, dtype=torch.int64, device=device),
            seq_lens=torch.ones(rows, dtype=torch.int64, device=device),
            seq_lens_cpu=torch.ones(rows, dtype=torch.int64),
            seq_lens_sum=rows,
            out_cache_loc=inputs.slots,
            positions=inputs.positions,
            spec_info=None,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        self._backend.kernel = kernel
        context = ForwardContext(attn_backend=self._backend)
        with (
            torch.no_grad(),
            get_model().override(shared_experts=runner.model.shared_experts_config),
            forward_context(context, forward_batch=batch),
        ):
            output = runner.model.forward(inputs.tokens, inputs.positions, batch)
        return output.next_token_logits


class DeviceForward:
    """``ModelForward`` by padded size, on static buffers, with a graph per size where graphs are captured.

    ``candidates``: how many best tokens a draft step needs. ``last_position``: highest position with a
    rotary angle; tokens beyond it are never kept, so they may compute anything. ``vocabulary``: rows of the
    embedding; a target with more of them only pads further, but its padding must not be looked up.
    """

    first_tokens = 2
    """The last cached token and the root, so that a search's first size does not depend on what the last
    verification accepted; writing a key twice writes the same."""

    def __init__(
        self,
        call: ModelCall,
        make_kernel: MakeKernel,
        table: GraphTable,
        inputs: Inputs,
        buffers: AttentionBuffers,
        sizes: Sizes,
        req_to_token: Tensor,
        candidates: int,
        last_position: int,
        vocabulary: int,
    ) -> None:
        self.inputs, self.buffers, self.table, self.sizes = inputs, buffers, table, sizes
        self.device = inputs.tokens.device
        self.most_tokens = sizes.most_tokens
        self._last_position, self._last_token = last_position, vocabulary - 1
        self._call, self._make_kernel, self._candidates = call, make_kernel, candidates
        self._req_to_token = req_to_token
        self._kernels: dict[tuple[int, int], TreeKernel] = {}
        self._runs: list[Run] = []
        self._logits: Tensor | None = None  # of all graphs: 16 sizes with 128k tokens would take a gigabyte

    # -- one forward --------------------------------------------------------------------------

    def arrays(self, batch: TreeBatch) -> dict[str, np.ndarray]:
        """Where its keys and the bits of its mask stand; see ``_load``."""
        assert batch.gap is None, "only the steps of a search leave places out"
        extent = Extent(batch.q_lens, batch.kv_lens)
        seen = seen_by(batch)
        byte, clear = window_bits(extent, seen.shape[1])
        return {
            "kv_rows": batch.pool_rows, "kv_ends": extent.kv_starts[1:], "byte": byte, "clear": clear,
            "seen": seen,
        }  # fmt: skip

    def run(self, batch: TreeBatch, tensors: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab] and their argmax int64 [T], valid until the next forward."""
        if tensors is None:
            own = {
                "tokens": batch.tokens, "positions": batch.positions, "places": batch.places,
                "pool_row": batch.pool_rows[batch.row],
            }  # fmt: skip
            tensors = put({**own, **self.arrays(batch)}, self.device)
        count, n = len(batch), len(batch.q_lens)
        key = self.sizes.verification(count, n)
        slots = self._req_to_token[tensors["pool_row"], tensors["places"]]
        self._set_tokens(tensors["tokens"], tensors["positions"], slots, key.tokens)
        spare = key.rows - n
        self._set_slots(tensors["kv_rows"], tensors["kv_ends"], int(batch.kv_lens.sum()), spare)
        # One request more than can be there holds the padding, which sees its one key.
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        if spare:
            q_lens = np.concatenate([q_lens, [key.tokens - count], np.zeros(spare - 1, np.int64)])
            kv_lens = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        extent = Extent(q_lens, kv_lens)
        self.buffers.set_mask(int(extent.byte_starts[-1]), tensors["byte"], tensors["clear"], tensors["seen"])
        logits, best = self._replay(key, extent, planned=False)
        return logits[:count], best[:count]

    def logits(self, states: tuple[Tensor, Tensor]) -> Tensor:
        logits = states[0]
        return logits.clone() if logits.dtype == torch.float32 else logits.float()

    def argmax(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return states[1]

    # -- a search -----------------------------------------------------------------------------

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """Queues all steps; nothing waits until the candidates are read."""
        shape, a = search.shape, len(search.base)
        levels = Levels(shape, a, self.device)
        reading = Reading(search.scale, search.spread, search.keys, search.base)
        kv_lens = without_gap(search.base + shape.width, first.gap)
        steps = _Steps(self, search.pool_rows, kv_lens, shape.width, reading, first.gap)
        there = put({"tokens": first.tokens, "places": first.places, "base": search.base}, self.device)
        tokens, places = (there[name].view(a, FIRST) for name in ("tokens", "places"))
        before = torch.zeros(a, FIRST, shape.width, dtype=torch.bool, device=self.device)
        before[:, 1, 0] = True  # the root sees itself; the token before it stands before the window
        logprob, token = steps.run(tokens, places, places, before, "last-candidates")
        levels.start(logprob[:, 0], token[:, 0])
        base = there["base"][:, None]
        for step in range(2, len(shape.beams) + 1):
            nodes = levels.level(step - 1)
            places = base + levels.columns[nodes]
            positions = (base + (step - 1)).expand_as(places)
            logprob, token = steps.run(
                levels.tokens[:, nodes], positions, places, levels.visible[:, nodes], "candidates"
            )
            levels.grow(step, logprob, token)
        copy = QueuedCopy({"tokens": levels.tokens, "parents": levels.parents, "logprobs": levels.logprobs})
        return lambda: Beams(**copy.read(), steps=len(shape.beams))

    def candidates(self, batch: TreeBatch, reading: Reading, width: int) -> tuple[Tensor, Tensor]:
        """One draft step. Requests must have as many tokens each, and their readings be alike in them."""
        a, q = len(batch.q_lens), int(batch.q_lens[0])
        assert (batch.q_lens == q).all(), "draft steps have the same number of beams for every request"
        of_rows = Reading(*(getattr(reading, f.name)[::q] for f in fields(reading)))
        seen = seen_by(batch)
        arrays = {"tokens": batch.tokens, "positions": batch.positions, "places": batch.places, "seen": seen}
        there = put(arrays, self.device)
        tokens, positions, places = (there[name].view(a, q) for name in ("tokens", "positions", "places"))
        steps = _Steps(self, batch.pool_rows, batch.kv_lens, seen.shape[1], of_rows)
        best = steps.run(tokens, positions, places, there["seen"].view(a, q, -1), "candidates")
        logprob, token = (v.flatten(0, 1)[:, :width] for v in best)
        return logprob, token

    # -- buffers and graphs -------------------------------------------------------------------

    def _set_tokens(self, tokens: Tensor, positions: Tensor, slots: Tensor, padded: int) -> None:
        """Fills the inputs; padding repeats token 0 at position 0 in the scratch slot."""
        count = tokens.shape[0]
        if padded > self.inputs.tokens.shape[0]:
            raise RuntimeError(
                f"a forward of {padded} tokens exceeds the {self.inputs.tokens.shape[0]} reserved"
            )
        i = self.inputs
        i.tokens[:count].copy_(tokens.clamp(max=self._last_token))
        i.positions[:count].copy_(positions.clamp(max=self._last_position))
        i.slots[:count].copy_(slots)
        if padded > count:
            i.tokens[count:padded].zero_()
            i.positions[count:padded].zero_()
            i.slots[count:padded].fill_(SCRATCH_SLOT)

    def _set_slots(
        self,
        pool_rows: Tensor,
        kv_ends: Tensor,
        total: int,
        spare: int,
        gap: tuple[int, Tensor] | None = None,
    ) -> None:
        self.buffers.set_slots(gather_slots(self._req_to_token, pool_rows, kv_ends, total, gap), spare)

    def _replay(self, key: Key, extent: Extent, planned: bool) -> Any:
        """The forward of ``key`` on what the buffers hold. Its output is valid until the key's next run.

        ``planned``: the extent is that of the key's last run.
        """
        if key in self.sizes.captured:
            size = (key.tokens, key.rows)
            if size not in self._kernels:
                self._kernels[size] = self._make_kernel(self.buffers, key.rows)
            kernel = self._kernels[size]
            if not planned:
                kernel.plan(extent)
            forward = self.table.get(key, partial(self._forward, key, kernel)).replay
        else:  # rare sizes are not kept: there are too many of them
            kernel = self._make_kernel(self.buffers, key.rows)
            kernel.plan(extent)
            forward = partial(self._forward, key, kernel)
        start = mark(self.device)
        output = forward()
        self._runs.append((start, mark(self.device)))
        return output

    def capture(self, key: Key) -> None:
        """Makes the graph of ``key``, on nothing but padding."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._set_tokens(none, none, none, key.tokens)
        self.buffers.set_slots(none.int(), key.rows)
        self.buffers.mask.fill_(255)
        each, rest = divmod(key.tokens, key.rows)
        q_lens = np.full(key.rows, each, np.int64)
        q_lens[0] += rest
        self._replay(key, Extent(q_lens, np.ones(key.rows, np.int64)), planned=False)

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs

    def _forward(self, key: Key, kernel: TreeKernel) -> Any:
        inputs = self.inputs.front(key.tokens)
        logits = self._call(inputs, key.rows, kernel)
        if key.head == "logits":
            logits = self._shared(key, logits)
            return logits, logits.argmax(dim=-1)
        i = inputs
        scale, spread, keys, positions = i.scale, i.spread, i.keys, i.positions
        if key.head == "last-candidates":
            logits = logits[1::FIRST]
            scale, spread, keys, positions = (v[1::FIRST] for v in (scale, spread, keys, positions))
        if key.noisy:
            scaled = noise.read(logits, scale, spread, keys, positions)
        else:
            scaled = logits.float() * scale[:, None]
        best = scaled.topk(self._candidates, dim=-1)
        return best.values - scaled.logsumexp(dim=-1, keepdim=True), best.indices

    def _shared(self, key: Key, logits: Tensor) -> Tensor:
        """Logits of a graph in a buffer that all graphs share; those of eager forwards as they are."""
        if key not in self.sizes.captured:
            return logits
        if self._logits is None:  # before the first capture: graphs are made after a warm-up
            most = max(k.tokens for k in self.sizes.captured)
            self._logits = torch.empty(most, logits.shape[1], dtype=logits.dtype, device=self.device)
        return self._logits[: key.tokens].copy_(logits)


class _Steps:
    """Draft steps of a requests, padded to R: they share slots, sizes and mask layouts.

    ``kv_lens`` int64 [a]; ``width``: keys at their end that a mask tells of; ``reading``: of the requests,
    whose positions the forwards have; ``gap``: what their keys leave out.
    """

    def __init__(
        self,
        forward: DeviceForward,
        pool_rows: np.ndarray,
        kv_lens: np.ndarray,
        width: int,
        reading: Reading,
        gap: Gap | None = None,
    ) -> None:
        self._forward, self._width = forward, width
        self._a, self._padded = len(kv_lens), forward.sizes.rows.fit(len(kv_lens))
        spare = self._padded - self._a
        self._kv_lens = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        self._noisy = bool((reading.spread > 0).any())
        there = put(
            {
                "pool_rows": pool_rows, "kv_ends": np.cumsum(kv_lens), "scale": reading.scale,
                "spread": reading.spread, "keys": reading.keys,
                **({} if gap is None else {"gap": gap.length}),
            },
            forward.device,
        )  # fmt: skip
        self._pool_rows = there["pool_rows"]
        self._reading = [there[name] for name in ("scale", "spread", "keys")]
        left_out = None if gap is None else (gap.start, there["gap"])
        forward._set_slots(self._pool_rows, there["kv_ends"], int(kv_lens.sum()), spare, left_out)
        self._layout: tuple[int, Extent, dict[str, Tensor]] | None = None

    def run(
        self, tokens: Tensor, positions: Tensor, places: Tensor, seen: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (float64) and ids of the best tokens, [a, q (1 with last-candidates), K].

        Arguments are [a, q] and, for ``seen``, [a, q, width].
        """
        f, q = self._forward, tokens.shape[1]
        padded, spare = self._padded * q, (self._padded - self._a) * q
        slots = f._req_to_token[self._pool_rows[:, None], places]
        f._set_tokens(tokens.flatten(), positions.flatten(), slots.flatten(), padded)
        i, used = f.inputs, self._a * q
        for target, source in zip((i.scale, i.spread, i.keys), self._reading, strict=True):
            target[:used].view(-1, q).copy_(source[:, None].expand(-1, q))
        first = self._layout is None or self._layout[0] != q
        if first:
            self._layout = self._lay_out(q)
        assert self._layout is not None
        _, extent, bits = self._layout
        seen = torch.nn.functional.pad(seen.flatten(0, 1), (0, 0, 0, spare), value=True)
        f.buffers.set_mask(int(extent.byte_starts[-1]), bits["byte"], bits["clear"], seen)
        logprob, token = f._replay(Key(padded, self._padded, head, self._noisy), extent, planned=not first)
        shape = (self._padded, q if head == "candidates" else 1, -1)
        return logprob.double().view(shape)[: self._a], token.view(shape)[: self._a]

    def _lay_out(self, q: int) -> tuple[int, Extent, dict[str, Tensor]]:
        extent = Extent(np.full(self._padded, q, np.int64), self._kv_lens)
        byte, clear = window_bits(extent, self._width)
        return q, extent, put({"byte": byte, "clear": clear}, self._forward.device)

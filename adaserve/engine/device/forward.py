"""One model's tree forwards on a device: static inputs, padded sizes, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Protocol

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from torch import Tensor

from adaserve.engine.device import noise
from adaserve.engine.device.attention import (
    INT_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    AttentionBuffers,
    Extent,
    FlashInferKernel,
    HeadShape,
    SdpaKernel,
    TreeAttentionBackend,
    TreeKernel,
)
from adaserve.engine.device.clock import Mark, mark
from adaserve.engine.device.graphs import GraphTable
from adaserve.engine.device.layout import SCRATCH_SLOT

Head = Literal["logits", "candidates", "last-candidates"]
"""What a forward gives: logits and their argmax; the best tokens of every row; of every second one."""


@dataclass(frozen=True)
class Key:
    """A padded size: what a graph is made for."""

    tokens: int
    rows: int
    head: Head
    noisy: bool = False  # candidates are those of requests that sample: noise is added to the logits


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
    """Forwards of one model by padded size.

    ``candidates``: how many best tokens a draft step needs. ``last_position``: highest position with a
    rotary angle; tokens beyond it are never kept, so they may compute anything. ``vocabulary``: rows of the
    embedding; a target with more of them only pads further, but its padding must not be looked up.
    """

    def __init__(
        self,
        call: ModelCall,
        make_kernel: Callable[[AttentionBuffers, int], TreeKernel],
        table: GraphTable,
        inputs: Inputs,
        buffers: AttentionBuffers,
        candidates: int,
        last_position: int,
        vocabulary: int,
    ) -> None:
        self.inputs, self.buffers, self.table = inputs, buffers, table
        self.device = inputs.tokens.device
        self.last_position, self._last_token = last_position, vocabulary - 1
        self._call, self._make_kernel, self._candidates = call, make_kernel, candidates
        self._kernels: dict[tuple[int, int], TreeKernel] = {}
        self._runs: list[tuple[Mark, Mark]] = []

    def set_tokens(self, tokens: Tensor, positions: Tensor, slots: Tensor, padded: int) -> None:
        """Fills the inputs; padding repeats token 0 at position 0 in the scratch slot."""
        count = tokens.shape[0]
        if padded > self.inputs.tokens.shape[0]:
            raise RuntimeError(
                f"a forward of {padded} tokens exceeds the {self.inputs.tokens.shape[0]} reserved"
            )
        i = self.inputs
        i.tokens[:count].copy_(tokens.clamp(max=self._last_token))
        i.positions[:count].copy_(positions.clamp(max=self.last_position))
        i.slots[:count].copy_(slots)
        if padded > count:
            i.tokens[count:padded].zero_()
            i.positions[count:padded].zero_()
            i.slots[count:padded].fill_(SCRATCH_SLOT)

    def run(self, key: Key, extent: Extent, captured: bool, planned: bool = False) -> Any:
        """The forward of ``key`` on what the buffers hold. Its output is valid until the key's next run.

        ``captured``: the key is one of the tiers'. ``planned``: the extent is that of the key's last run.
        """
        if captured:
            size = (key.tokens, key.rows)
            if size not in self._kernels:
                self._kernels[size] = self._make_kernel(self.buffers, key.rows)
            kernel = self._kernels[size]
            if not planned:
                kernel.plan(extent)
            forward = self.table.get(key, partial(self._forward, key, kernel)).replay
        else:  # rare sizes are not kept: there is no end of them
            kernel = self._make_kernel(self.buffers, key.rows)
            kernel.plan(extent)
            forward = partial(self._forward, key, kernel)
        start = mark(self.device)
        output = forward()
        self._runs.append((start, mark(self.device)))
        return output

    def take_runs(self) -> list[tuple[Mark, Mark]]:
        """Start and end of every forward since the last call; durations are known once they were reached."""
        runs, self._runs = self._runs, []
        return runs

    def _forward(self, key: Key, kernel: TreeKernel) -> Any:
        inputs = self.inputs.front(key.tokens)
        logits = self._call(inputs, key.rows, kernel)
        if key.head == "logits":
            return logits, logits.argmax(dim=-1)
        i = inputs
        scale, spread, keys, positions = i.scale, i.spread, i.keys, i.positions
        if key.head == "last-candidates":
            logits = logits[1::2]
            scale, spread, keys, positions = scale[1::2], spread[1::2], keys[1::2], positions[1::2]
        if key.noisy:
            scaled = noise.read(logits, scale, spread, keys, positions)
        else:
            scaled = logits.float() * scale[:, None]
        best = scaled.topk(self._candidates, dim=-1)
        return best.values - scaled.logsumexp(dim=-1, keepdim=True), best.indices

    def synchronize(self) -> None:
        """Waits for the device, so that what is timed has happened."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def kernel_maker(runner: Any, device: torch.device) -> Callable[[AttentionBuffers, int], TreeKernel]:
    """FlashInfer on CUDA, SDPA elsewhere: the one place where devices differ in kernels."""
    heads = HeadShape.of(runner)
    if device.type != "cuda":
        return lambda buffers, rows: SdpaKernel(buffers)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    integers = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return lambda buffers, rows: FlashInferKernel(buffers, rows, heads, workspace, integers)

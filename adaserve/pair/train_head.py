"""Trains the embedded target's heads (`adaserve pair train-head`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.pair.data import open_stream
from adaserve.pair.distill import lessons
from adaserve.pair.eagle import EagleHead, HeadShape, load_head, narrowed, save_head
from adaserve.pair.target_outputs import TargetOutputs, target_outputs
from adaserve.pair.train import Run, Trainer, head_run

STEPS = 4
SHARPENED = 0.7
"""The temperature at which distributions are compared: what requests sample at, between greedy and 1."""
STEP_WEIGHT = 0.8
"""Weight of a step's loss over that of the step before: later steps are reached less often."""
_MATRIX_LR, _VECTOR_LR = 0.03, 0.004


class CrossEntropy(torch.autograd.Function):
    """The mean cross entropy in nats of logits [rows, length, vocab] with ``wanted`` of the same shape, both
    at ``SHARPENED``, over all but the ``first`` places of each row.

    Keeps nothing but the gradient: on a CPU passes over the vocabulary cost more than all products.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, first: int) -> Tensor:
        got = torch.log_softmax(logits / SHARPENED, -1)
        loss = -torch.linalg.vecdot(wanted, got)[:, first:].float().mean()
        gradient = got.exp_().sub_(wanted)
        gradient[:, :first] = 0
        ctx.save_for_backward(gradient)
        ctx.scale = 1 / (SHARPENED * gradient.shape[0] * (gradient.shape[1] - first))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(float(outer[0]) * ctx.scale), None, None


def unrolled_loss(head: EagleHead, seen: TargetOutputs, steps: int) -> Tensor:
    """Forward KL(target || head) over the tokens that the head knows, in nats per token, averaged over the
    steps by their weights."""
    wanted = (seen.logits[:, 1:, head.token_ids] / SHARPENED).log_softmax(-1)
    plain = wanted.exp()
    entropy = -torch.linalg.vecdot(plain, wanted).float()
    total, weight = torch.zeros(()), 1.0
    for step, states in enumerate(head.unroll(seen.tokens, seen.layers, steps)):
        crossed = CrossEntropy.apply(head.logits(states), plain, step)  # type: ignore[no-untyped-call]
        total = total + weight * (crossed - entropy[:, step:].mean())
        weight *= STEP_WEIGHT
    return total * (1 - STEP_WEIGHT) / (1 - weight)


def frequent_tokens(streams: list[Path], count: int, vocabulary: int) -> Tensor:
    """int64 [count], ascending: what is most frequent, each stream counting alike."""
    share = np.zeros(vocabulary)
    for stream in map(open_stream, streams):
        share += np.bincount(stream, minlength=vocabulary) / len(stream)
    return torch.from_numpy(np.sort(np.argsort(-share, kind="stable")[:count]))


def fast_products() -> AbstractContextManager[Any]:
    """bf16 products if the processor has them: three times the speed of training."""
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.autocast("cpu", torch.bfloat16) if fast else nullcontext()


def train_eagle(run: Run, pair: Path, *, written_tokens: int, shape: HeadShape) -> Path:
    """An EAGLE-3 head for ``pair/target``, in the folder that is returned. ``run.start``: a head to go on
    from, with ``shape``'s KV heads and otherwise as it is."""
    target, text = lessons(run, pair / "target", written_tokens)
    if run.start is None:
        streams = [run.corpus / "train.bin", run.out / "written.bin"]
        head = EagleHead(target, shape, frequent_tokens(streams, shape.vocab, target.shape.vocab))
    else:
        head = narrowed(load_head(run.start, target), target, shape.kv_heads)

    def loss(window: Tensor) -> Tensor:
        with fast_products():
            return unrolled_loss(head, target_outputs(target, window[:, :-1], head.shape.layers), STEPS)

    Trainer(head_run(run, _MATRIX_LR, _VECTOR_LR), head, text, loss).fit("EAGLE-3 head")
    save_head(head, done := run.out / "head")
    return done

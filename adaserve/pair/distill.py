"""Trains the draft to predict what the target would say.

The draft starts as a slice of the target and minimizes the forward KL divergence to the target's next-token
distribution, plain and sharpened (greedy requests only care for the best token), on real text and on text
that the target wrote itself, since that is what a draft meets when it serves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.data import Batches, open_stream
from adaserve.pair.generate import generate
from adaserve.pair.model import Block, TinyLlama, load_hf, most_used_columns, save_hf
from adaserve.pair.shape import DRAFT, Shape
from adaserve.pair.train import Run, Trainer

SHARPENED = 0.4
WRITTEN_TEMPERATURES = (0.0, 0.7, 0.7, 1.0)
MATRIX_LR, VECTOR_LR = 0.02, 0.002  # the embedding comes trained and moves less than the target's did
_PROMPT_TOKENS, _ROW_TOKENS, _ROWS_PER_BATCH = 48, 512, 96


def sliced(target: TinyLlama, shape: Shape) -> TinyLlama:
    """A draft with the target's embedding, some of its layers and their most used MLP columns."""
    draft = TinyLlama(shape)
    draft.embed.load_state_dict(target.embed.state_dict())
    draft.norm.load_state_dict(target.norm.state_dict())
    chosen = np.linspace(0, target.shape.layers - 1, shape.layers).round().astype(int)
    for block, index in zip(draft.blocks, chosen, strict=True):
        source = target.blocks[int(index)]
        assert isinstance(block, Block) and isinstance(source, Block)
        for name in ("attn_norm", "mlp_norm", "qkv", "out"):
            block.get_submodule(name).load_state_dict(source.get_submodule(name).state_dict())
        gate_up, down = most_used_columns(source, shape.mlp)
        block.gate_up.weight.data.copy_(gate_up)
        block.down.weight.data.copy_(down)
    return draft


def divergence(draft_logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """Mean forward KL(target || draft), both at `temperature`, in nats per token."""
    target = fn.log_softmax(target_logits / temperature, dim=-1)
    draft = fn.log_softmax(draft_logits / temperature, dim=-1)
    return (target.exp() * (target - draft)).sum(-1).mean()


def write_text(target: TinyLlama, stream: Path, out: Path, tokens: int, *, seed: int) -> None:
    """The target continues openings from the training text until `tokens` tokens are on disk."""
    openings = Batches(open_stream(stream), seed=seed + 1)
    new = _ROW_TOKENS - _PROMPT_TOKENS
    batches = max(1, tokens // (_ROWS_PER_BATCH * _ROW_TOKENS))
    temperature = torch.tensor(WRITTEN_TEMPERATURES).repeat(_ROWS_PER_BATCH // len(WRITTEN_TEMPERATURES))
    partial = out.with_suffix(".partial")
    with partial.open("wb") as file:
        for batch in track(range(batches), description="Target writes text"):
            prompts = openings.take(_ROWS_PER_BATCH, _PROMPT_TOKENS)[:, :-1]
            written = generate(target, prompts, new, temperature, seed=seed * 1000 + batch)
            file.write(written.numpy().astype(np.uint16).tobytes())
    partial.rename(out)


def distillation_loss(draft: TinyLlama, target: TinyLlama, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = target(tokens)
    got = draft(tokens)
    return divergence(got, wanted, 1.0) + 0.5 * divergence(got, wanted, SHARPENED)


class Mixture(Batches):
    """Half of each batch is real text, half the target's own."""

    def __init__(self, real: Batches, written: Batches) -> None:
        super().__init__(real.stream, seed=real.seed)
        self.real, self.written = real, written

    def take(self, rows: int, length: int) -> Tensor:
        self.real.used_tokens = self.written.used_tokens = self.used_tokens // 2
        half = rows // 2
        window = torch.cat((self.real.take(half, length), self.written.take(rows - half, length)))
        self.used_tokens += rows * length
        return window


def lessons(run: Run, target_folder: Path, written_tokens: int) -> tuple[TinyLlama, Mixture]:
    """A target, which is not trained, and endless batches for its drafts. It writes its half of the text,
    once, to ``run.out``. Threads and random numbers are those of the run from here on."""
    torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    target = load_hf(target_folder).requires_grad_(False)
    run.out.mkdir(parents=True, exist_ok=True)
    real, written = run.corpus / "train.bin", run.out / "written.bin"
    if not written.exists():
        write_text(target, real, written, written_tokens, seed=run.seed)
    streams = (Batches(open_stream(path), seed=run.seed) for path in (real, written))
    return target, Mixture(*streams)


def train_draft(run: Run, target_folder: Path, *, written_tokens: int) -> None:
    target, text = lessons(run, target_folder, written_tokens)
    draft = sliced(target, DRAFT) if run.start is None else load_hf(run.start / "draft")

    def loss(window: Tensor) -> Tensor:
        return distillation_loss(draft, target, window[:, :-1])

    Trainer(run, draft, text, loss).fit("draft")
    save_hf(draft, run.out)

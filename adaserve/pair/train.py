"""The loop of all training, and the training of the embedded target (`adaserve pair train`)."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn
from torch.nn import functional as fn

from adaserve.host.files import write_atomically
from adaserve.pair.data import Batches, open_stream
from adaserve.pair.model import TinyLlama, load_hf, save_hf
from adaserve.pair.optimizer import make_optimizers
from adaserve.pair.schedule import FIRST, FURTHER, HEAD_PHASES, Clock, Phase, learning_rate
from adaserve.pair.shape import TARGET

CHECKPOINT_EVERY_S = 60.0
MATRIX_LR, VECTOR_LR = 0.02, 0.004


@dataclass(frozen=True)
class Run:
    """One training run; `minutes` is wall-clock time over all resumes together."""

    corpus: Path
    out: Path
    minutes: float
    seed: int = 0
    threads: int = 2
    compile: bool = True
    bf16: bool = False  # products in bfloat16: twice as fast if the CPU has AMX
    matrix_lr: float = MATRIX_LR
    vector_lr: float = VECTOR_LR
    phases: tuple[Phase, ...] = FIRST.target
    start: Path | None = None  # a trained pair to go on from


def head_run(run: Run, matrix_lr: float, vector_lr: float) -> Run:
    """``run`` for a head, with such peak learning rates, lower if it goes on from trained weights."""
    share = (FIRST if run.start is None else FURTHER).rates
    return replace(run, phases=HEAD_PHASES, matrix_lr=share * matrix_lr, vector_lr=share * vector_lr)


LossFunction = Callable[[Tensor], Tensor]


def next_token_loss(model: TinyLlama, window: Tensor) -> Tensor:
    logits = model(window[:, :-1])
    return fn.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )


class Trainer:
    """The loop of all training: take a batch, step, log, checkpoint, until the time is spent."""

    def __init__(self, run: Run, model: nn.Module, batches: Batches, loss: LossFunction) -> None:
        self.run, self.model, self.batches = run, model, batches
        self.loss = torch.compile(loss, dynamic=False) if run.compile else loss
        self.precision = torch.autocast("cpu", torch.bfloat16, enabled=run.bf16)
        self.optimizers = make_optimizers(model, matrix_lr=run.matrix_lr, vector_lr=run.vector_lr)
        self.peaks = [o.param_groups[0]["lr"] for o in self.optimizers]
        self.step = 0
        self.tokens = 0
        run.out.mkdir(parents=True, exist_ok=True)
        self.clock = Clock(run.minutes, self._resume())
        self._saved_at = self.clock.elapsed_s

    def _resume(self) -> float:
        path = self.run.out / "checkpoint.pt"
        if not path.exists():
            return 0.0
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.batches.used_tokens = (
            state["step"],
            state["tokens"],
            state["used_tokens"],
        )
        return float(state["elapsed_s"])

    def save_checkpoint(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "used_tokens": self.batches.used_tokens,
            "elapsed_s": self.clock.elapsed_s,
        }
        data = io.BytesIO()
        torch.save(state, data)
        write_atomically(self.run.out / "checkpoint.pt", data.getvalue())
        self._saved_at = self.clock.elapsed_s

    def train_step(self) -> float:
        phase = self.clock.phase(self.run.phases)
        factor = learning_rate(self.clock.share)
        window = self.batches.take(phase.rows, phase.length)
        with self.precision:
            loss = self.loss(window)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += phase.rows * phase.length
        return loss.item()

    def fit(self, description: str) -> None:
        with progress_bar() as bar, (self.run.out / "log.jsonl").open("a") as log:
            task = bar.add_task(description, total=self.run.minutes * 60)
            average = math.nan
            while self.clock.share < 1.0:
                loss = self.train_step()
                if not math.isfinite(loss):
                    raise RuntimeError(f"the loss became {loss} at step {self.step}; lower the learning rate")
                average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
                self._log(log, loss)
                text = f"{description} step {self.step} {self.tokens / 1e6:.2f} M tokens loss {average:.3f}"
                bar.update(task, completed=self.clock.elapsed_s, description=text)
                if self.clock.elapsed_s - self._saved_at > CHECKPOINT_EVERY_S:
                    self.save_checkpoint()
        self.save_checkpoint()

    def _log(self, log: Any, loss: float) -> None:
        row = {
            "step": self.step,
            "tokens": self.tokens,
            "s": round(self.clock.elapsed_s, 1),
            "loss": round(loss, 4),
        }
        log.write(json.dumps(row) + "\n")
        log.flush()


def train_target(run: Run) -> None:
    torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    model = TinyLlama(TARGET) if run.start is None else load_hf(run.start / "target")
    text = Batches(open_stream(run.corpus / "train.bin"), seed=run.seed)
    Trainer(run, model, text, lambda window: next_token_loss(model, window)).fit("target")
    save_hf(model, run.out)

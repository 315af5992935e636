"""Medusa heads on a CPU host (Medusa, section 2.1): drafts without steps and without a KV cache.

Head i guesses the token i + 2 places after a cached token from that token's hidden state alone, whatever
stands in between. So all levels of a tree come out of one product, and every node of a level has the same
children with the same probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adaserve.checkpoints.medusa import MedusaHeads, load_medusa, require_target
from adaserve.engine.beam_levels import Levels
from adaserve.engine.cpu.draft_heads import llama_target
from adaserve.engine.cpu.forwards import forbidding, found
from adaserve.engine.cpu.linear import Storage, torch_linear
from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.noise import best_of
from adaserve.engine.device import Beams, KeepGoing, Ready, Run, Search
from adaserve.engine.device_timing import HostMark
from adaserve.engine.hidden_states import HiddenStates, final_states
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.trees.batch import TreeBatch


class MedusaForward:
    """``Drafter`` of Medusa heads on the hidden states of ``target``, which ``hidden`` keeps."""

    def __init__(
        self,
        heads: MedusaHeads,
        target: LlamaModel,
        hidden: HiddenStates,
        req_to_token: Tensor,
        storage: Storage = "auto",
    ) -> None:
        self.target_states = hidden
        self._target, self._req_to_token = target, req_to_token
        self._blocks = [
            [torch_linear(w, b, storage) for w, b in zip(*head, strict=True)]
            for head in zip(heads.weight, heads.bias, strict=True)
        ]
        self._lm_heads = (
            None if heads.lm_heads is None else [torch_linear(m, None, storage) for m in heads.lm_heads]
        )
        self._runs: list[Run] = []

    @property
    def most_steps(self) -> int:
        return len(self._blocks)

    def rehearse(self, batch: TreeBatch, width: int) -> int:
        states = self._states(batch, self.most_steps)
        transform = LogitTransform.plain(np.ones(len(states) * states.shape[1]))
        self._best(states, transform, width)
        return self.most_steps

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """All levels at once, so ``keep`` is not asked: there is no step to save."""
        start = HostMark()
        beams = self._search(first, search)
        self._runs.append((start, HostMark()))
        return Ready(lambda: beams)

    @torch.no_grad()
    def _search(self, first: TreeBatch, search: Search) -> Beams:
        shape, a = search.shape, len(search.base)
        depth = len(shape.beams)
        levels = Levels(shape, a, torch.from_numpy(shape.columns))
        children = [shape.beams[0], *(levels.children(step) for step in range(2, depth + 1))]
        states = self._states(first, depth)
        if search.forbid is None:
            transforms = [search.transform(1, step) for step in range(1, depth + 1)]
            best = self._best(states, _joined(transforms), max(children))
            every = [v.view(depth, a, 1, -1) for v in best]
        else:
            logits = self._logits(states)
        for step in range(1, depth + 1):
            m = 1 if step == 1 else shape.beams[step - 2]
            if search.forbid is None:
                logprob, token = (v[step - 1].expand(-1, m, -1) for v in every)
            else:  # what grammars forbid depends on the path
                forbid = forbidding(search, levels, step)
                copies = logits[step - 1].repeat_interleave(m, dim=0)
                best = best_of(copies, search.transform(m, step), children[step - 1], forbid)
                logprob, token = (v.view(a, m, -1) for v in best)
            if step == 1:
                levels.start(logprob[:, 0].double(), token[:, 0])
            else:
                levels.grow(step, logprob.double(), token)
        return found(levels, depth)

    def _states(self, batch: TreeBatch, heads: int) -> Tensor:
        """fp32 [heads, n, H]: what the first heads make of the token before each request's last one."""
        last = batch.places[np.cumsum(batch.q_lens) - 1]
        slots = self._req_to_token.numpy()[batch.pool_rows, last - 1]
        hidden = self.target_states.read(torch.from_numpy(slots.astype(np.int64))).float()
        return torch.stack([_through(blocks, hidden) for blocks in self._blocks[:heads]])

    def _logits(self, states: Tensor) -> Tensor:
        """fp32 [heads, n, vocab]."""
        if self._lm_heads is None:
            return self._target.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        return torch.stack([lm_head(x) for lm_head, x in zip(self._lm_heads, states, strict=False)])

    def _best(self, states: Tensor, transform: LogitTransform, width: int) -> tuple[Tensor, Tensor]:
        """[heads * n, width] each: log-probabilities and tokens, best first."""
        if self._lm_heads is None:
            return self._target.topk_logprobs(states.flatten(0, 1), transform, width)
        return best_of(self._logits(states).flatten(0, 1), transform, width)

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs


def _through(blocks: Sequence[Any], x: Tensor) -> Tensor:
    for linear in blocks:
        x = x + functional.silu(linear(x))
    return x


def _joined(transforms: Sequence[LogitTransform]) -> LogitTransform:
    columns = zip(*((r.scale, r.spread, r.keys, r.positions) for r in transforms), strict=True)
    return LogitTransform(*map(np.concatenate, columns))


def medusa_forward(target: Any, folder: Path, storage: Storage) -> MedusaForward:
    """The forward of the heads in ``folder``, which from now on get the hidden states of the ``ModelRunner``
    ``target``. Raises UnsupportedError with the reason if they are not supported."""
    llama = llama_target(target, "Medusa heads need")
    heads, config = load_medusa(folder), llama.config
    require_target(heads, folder, config.hidden_size, config.vocab_size)
    llama.sink = hidden = final_states(target, config.hidden_size)
    return MedusaForward(heads, llama, hidden, target.req_to_token_pool.req_to_token, storage)

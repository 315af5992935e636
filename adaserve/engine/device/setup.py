"""What the device path needs of two loaded models: sizes, static buffers, forwards, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaserve.config import AdaServeConfig
from adaserve.engine.device.attention import AttentionBuffers, Extent
from adaserve.engine.device.drafter import FIRST
from adaserve.engine.device.forward import DeviceForward, Inputs, Key, SGLangCall, kernel_maker
from adaserve.engine.device.graphs import GraphTable, Tiers, capture_all
from adaserve.engine.device.measured import MeasuredForward
from adaserve.engine.device.verify import verify_key
from adaserve.engine.forwards import MEASURED_ATTRIBUTE

MOST_CAPTURED_ROWS = 64
MOST_CAPTURED_TOKENS = 512
"""Largest padded sizes with a graph; larger batches run eagerly, where launches no longer matter."""

MEASURED_KEYS = 1 << 20
"""Cached tokens of the largest forward that is measured at start (128 requests of 4 tokens at 4096)."""

CATCH_UP_TOKENS = 512
"""Cached tokens that a draft is fed in one forward, at least, when it has to catch up."""


@dataclass
class DeviceModels:
    """Both models' forwards and the sizes that they are padded to."""

    target: DeviceForward
    draft: DeviceForward
    row_tiers: Tiers
    token_tiers: Tiers
    most_rows: int
    most_tokens: int
    draft_folder: Path

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def captures(self) -> bool:
        return self.target.table.capture

    def capture(self, config: AdaServeConfig) -> None:
        """Captures every graph before the first request; the largest first."""
        if not self.captures:
            return
        draft, target = self.draft, self.target
        capture_all(
            "draft", draft_keys(self.row_tiers, config.max_width), lambda k: _warm(draft, k), draft.table
        )
        keys = [verify_key(t, self.token_tiers, self.most_rows) for t in reversed(self.token_tiers.sizes)]
        capture_all("verification", keys, lambda k: _warm(target, k), target.table)

    def to_json(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "captured": self.captures,
            "row_tiers": list(self.row_tiers.sizes),
            "token_tiers": list(self.token_tiers.sizes),
            "draft_graphs": self.draft.table.report.to_json(),
            "verification_graphs": self.target.table.report.to_json(),
        }

    def summary(self) -> str:
        if not self.captures:
            return "without CUDA graphs"
        total = [t.report for t in (self.draft.table, self.target.table)]
        return (
            f"{sum(r.graphs for r in total)} CUDA graphs in {sum(r.seconds for r in total):.1f} s, "
            f"{sum(r.bytes for r in total) / 1e6:.0f} MB"
        )


def draft_keys(tiers: Tiers, width: int) -> Iterator[Key]:
    """The first step, and steps of 1 to ``width`` beams, of every tier of rows; with and without noise."""
    for rows in reversed(tiers.sizes):
        for noisy in (True, False):
            yield Key(FIRST * rows, rows, "last-candidates", noisy)
            for beams in range(width, 0, -1):
                yield Key(beams * rows, rows, "candidates", noisy)


def _warm(forward: DeviceForward, key: Key) -> None:
    """One forward of ``key`` on nothing but padding."""
    none = torch.zeros(0, dtype=torch.int64, device=forward.device)
    forward.set_tokens(none, none, none, key.tokens)
    forward.buffers.set_slots(none.int(), key.rows)
    forward.buffers.mask.fill_(255)
    each, rest = divmod(key.tokens, key.rows)
    q_lens = np.full(key.rows, each, np.int64)
    q_lens[0] += rest
    forward.run(key, Extent(q_lens, np.ones(key.rows, np.int64)), captured=True)


def device_models(target: Any, draft: Any, config: AdaServeConfig) -> DeviceModels:
    """From two ``ModelRunner`` that share request and slot numbers. Raises ValueError when not covered."""
    device = torch.device(target.device)
    most_rows = int(target.max_running_requests)
    widest = 1 + config.max_candidates
    needed = most_rows * max(widest, FIRST * config.max_width)
    most_tokens = max(CATCH_UP_TOKENS, needed)
    context = int(target.req_to_token_pool.req_to_token.shape[1])
    kv_entries = max((most_rows + 1) * (context + widest), MEASURED_KEYS)
    # All tokens of the largest forward against the longest list there can be, every request on a byte.
    mask_bytes = most_tokens * (context + widest) // 8 + most_rows + 1
    capture = device.type == "cuda" and not bool(target.server_args.disable_cuda_graph)
    buffers = AttentionBuffers.allocate(kv_entries, mask_bytes, device)
    inputs = Inputs.allocate(Tiers.up_to(min(needed, MOST_CAPTURED_TOKENS)).fit(most_tokens), device)
    last = int(target.model_config.context_len) - 1

    def forwards(runner: Any, candidates: int) -> DeviceForward:
        return DeviceForward(
            SGLangCall(runner),
            kernel_maker(runner, device),
            GraphTable(capture),
            inputs,
            buffers,
            candidates,
            last,
            int(runner.model_config.vocab_size),
        )

    models = DeviceModels(
        target=forwards(target, 1),
        draft=forwards(draft, max(config.max_width, 3)),
        row_tiers=Tiers.up_to(min(most_rows, MOST_CAPTURED_ROWS)),
        token_tiers=Tiers.up_to(min(needed, MOST_CAPTURED_TOKENS)),
        most_rows=most_rows,
        most_tokens=most_tokens,
        draft_folder=Path(draft.model_config.model_path),
    )
    # The measurements at start run through these instead of SGLang's eager forward.
    setattr(target, MEASURED_ATTRIBUTE, MeasuredForward(models.target, models.token_tiers, most_rows))
    setattr(draft, MEASURED_ATTRIBUTE, MeasuredForward(models.draft, models.row_tiers, 0))
    return models

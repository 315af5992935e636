"""Measures the cost of a draft step and of a verification on this host with these models.

A short measurement runs at every server start (four seconds on the embedded pair); ``adaserve
profile`` runs a longer one. Both measure the forwards that serving uses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adaserve.engine.device import Device, Drafter, ModelForward
from adaserve.engine.trees.batch import TreeBatch
from adaserve.errors import UnsupportedError
from adaserve.scheduler.costs.profile import Profile

ENGINE_OVERHEAD_S = 1.0e-3
"""SGLang's own time around an iteration, until one has been observed."""

NO_DRAFT = 1e-3
"""Without a draft model its steps stand in a profile as this share of a verification: next to nothing."""

WIDTH = 3
"""Beams of each request that draft steps are measured with."""

LONG_POINTS = 8
"""That are measured of each kind of forward for the sake of long contexts, at most: see ``_long``."""

LONGEST, LONGEST_TREE = 8192, 8
"""Cached tokens per request that are measured at most, and tokens that positions must be left for besides."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Points to measure: tokens of one forward, cached tokens per request, repetitions."""

    verify_tokens: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    stop_s: float  # larger forwards than one of this length are not tried


_MORE_TOKENS = (96, 128, 192, 256, 384, 512) if torch.cuda.is_available() else ()
"""A GPU verifies some hundred tokens in the time of one, so its knee lies further out."""
_MORE_CONTEXTS = (4096,) if torch.cuda.is_available() else ()

QUICK = Grid(
    (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, *_MORE_TOKENS),
    (1, 2, 4, 8, 16, 32, 64),
    (128, 512, *_MORE_CONTEXTS),
    3,
    0.25,
)
FULL = Grid(
    (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, *(_MORE_TOKENS or (96, 128))),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96),
    (64, 256, 768, *_MORE_CONTEXTS),
    7,
    5.0,
)


def profile_steps() -> int:
    """Points of a full profile, at most."""
    return len(FULL.contexts) * (len(FULL.verify_tokens) + len(FULL.draft_tokens)) + 2 * LONG_POINTS


@dataclass(frozen=True)
class Room:
    """An empty KV pool, whose slots are given to made-up requests."""

    device: Device
    req_to_token: torch.Tensor
    slots: int  # size of the pool
    most_rows: int  # requests that run at a time
    context_len: int  # positions that the models have

    def batch(self, rows: int, q_lens: np.ndarray, context: int) -> TreeBatch | None:
        """``rows`` requests with ``context`` cached tokens; None where there is no room for them."""
        kv_lens = q_lens + context
        most_rows, most_tokens = self.req_to_token.shape
        if rows > most_rows or int(kv_lens.max()) > most_tokens or int(kv_lens.sum()) >= self.slots:
            return None
        ends = np.cumsum(kv_lens)
        for row, (end, length) in enumerate(zip(ends.tolist(), kv_lens.tolist(), strict=True)):
            at = torch.arange(1 + end - length, 1 + end, dtype=self.req_to_token.dtype)
            self.req_to_token[row, :length] = at.to(self.req_to_token.device)
        starts, tokens = np.full(rows, context), np.ones(int(q_lens.sum()), np.int64)
        return TreeBatch.causal(tokens, np.arange(rows), starts, q_lens)

    def longest(self, rows: int, tokens: int) -> int:
        """The most cached tokens that each of ``rows`` requests is measured with, besides ``tokens`` new
        ones."""
        room = min(self.slots // rows, self.req_to_token.shape[1]) - tokens - 1
        return min(LONGEST, self.context_len - LONGEST_TREE, room)

    def leave(self) -> None:
        self.req_to_token.zero_()
        self.device.mark().wait()  # requests are served on other streams


def measure(
    room: Room, drafting: Sequence[Drafter], grid: Grid, progress: Callable[[str], None] = lambda _: None
) -> Profile:
    """Times the forwards of the target, and of what drafts, as they are served."""
    # Longer contexts than the models have positions for would read past their rotary tables.
    short = tuple(c for c in grid.contexts if c < room.context_len) or (max(1, room.context_len // 2),)
    grid = dataclasses.replace(grid, contexts=short)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # Tensor-parallel ranks run the same forwards, so none may stop by its own clock.
        grid = dataclasses.replace(grid, stop_s=float("inf"))
    target = room.device.target
    try:
        verifying = _Timed(room, [target], _verify_step(target), grid.repeats, progress, "verify")
        verify = _sweep(verifying, grid.verify_tokens, 4, grid)
        if not len(verify):
            raise UnsupportedError(
                f"the KV cache has room for {room.slots} tokens, too little for a single request: raise "
                "--max-total-tokens or --mem-fraction-static"
            )
        drafts = verify * (1.0, 1.0, 1.0, NO_DRAFT)
        if drafting:
            timed = _Timed(room, drafting, _draft_step(drafting), grid.repeats, progress, "draft")
            drafts = _sweep(timed, grid.draft_tokens, WIDTH, grid)
    finally:
        room.leave()
    return Profile(draft=drafts, verify=verify, overhead_s=ENGINE_OVERHEAD_S)


Step = Callable[[TreeBatch], int]
"""Runs forwards of a batch; how many of each model."""


def _verify_step(target: ModelForward) -> Step:
    def step(batch: TreeBatch) -> int:
        target.argmax(target.run(batch))
        return 1

    return step


def _draft_step(drafts: Sequence[Drafter]) -> Step:
    """A draft step of all drafting models, one after the other."""
    return lambda batch: max([draft.rehearse(batch, WIDTH) for draft in drafts])


@dataclass(frozen=True)
class _Timed:
    """Times one kind of forward."""

    room: Room
    models: Sequence[Drafter]
    step: Step
    repeats: int
    progress: Callable[[str], None]
    what: str

    def point(self, q_lens: np.ndarray, context: int) -> tuple[float, ...] | None:
        """(tokens, cached tokens, requests, seconds) of a forward over ``q_lens`` tokens of each request with
        ``context`` cached ones; None where there is no room."""
        rows, tokens = len(q_lens), int(q_lens.sum())
        batch = self.room.batch(rows, q_lens, context)
        if batch is None:
            return None
        seconds = _time(self.room.device, self.models, self.step, batch, self.repeats)
        self.progress(f"{self.what} {tokens} tokens, context {context}: {seconds * 1e3:.1f} ms")
        return tokens, rows * context, rows, seconds


def _sweep(timed: _Timed, sizes: Iterable[int], per_row: int, grid: Grid) -> np.ndarray:
    """Points [k, 4] of forwards over ``sizes`` tokens, ``per_row`` of each request where that divides them,
    and more where there are not as many requests: about as under load. Then what long contexts add."""
    points = []
    for context in grid.contexts:
        for tokens in sizes:
            rows = max(1, tokens // per_row)
            if timed.what == "verify":
                rows = min(rows, timed.room.most_rows)
            q_lens = np.full(rows, tokens // rows, np.int64)
            if timed.what == "verify":
                q_lens[: tokens % rows] += 1
            point = timed.point(q_lens, context)
            if point is None:
                continue
            points.append(point)
            if point[-1] > grid.stop_s:
                break
    points += _long(timed, per_row, grid.contexts[0])
    return np.array(points, np.float64)


def _long(timed: _Timed, per_row: int, short: int) -> list[tuple[float, ...]]:
    """Forwards of one and of ``per_row`` tokens per request, each with a ``short`` context and with the
    longest: they tell sum L from sum q L (``fit_kv_read``)."""
    points = []
    for rows, each in itertools.product((1, min(4, timed.room.most_rows)), (1, per_row)):
        long = timed.room.longest(rows, each)
        pair = [timed.point(np.full(rows, each, np.int64), c) for c in (short, long) if long > short]
        points += [p for p in pair if p is not None]
    return points


def _time(device: Device, models: Sequence[Drafter], step: Step, batch: TreeBatch, repeats: int) -> float:
    """Seconds of one forward, the shortest of several runs: what other programs cost is left to online
    learning.
    """
    count = step(batch)
    return min(device.time(models, lambda: step(batch)) for _ in range(repeats)) / count

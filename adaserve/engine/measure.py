"""What a draft step and a verification cost on this host with these models.

A short measurement runs at every server start (about a second on the embedded pair); ``adaserve
profile`` runs a longer one and keeps it. Both measure the forwards that serving uses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaserve.config import AdaServeConfig
from adaserve.engine.parts import Device
from adaserve.engine.reading import Reading
from adaserve.engine.trees.batch import TreeBatch
from adaserve.host import cpu_name
from adaserve.scheduler.fit import fit_latency, fit_table
from adaserve.scheduler.latency import LatencyModel, Profile, ProfileError, load_profile

logger = logging.getLogger(__name__)

ENGINE_OVERHEAD_S = 1.0e-3
"""SGLang's own time around an iteration before any was observed; policies correct it online."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Points to measure: tokens of one forward, cached tokens per request, repetitions."""

    verify_tokens: tuple[int, ...]
    draft_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    stop_s: float  # larger forwards than one of this length are not tried


PROFILE_ENV = "ADASERVE_MEASURE_PROFILE"
"""Set by `adaserve profile`: JSON with the files for progress ("ticks") and result ("out")."""

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


def measure(
    device: Device,
    req_to_token: torch.Tensor,
    slots: int,
    grid: Grid,
    width: int = 3,
    progress: Callable[[str], None] = lambda _: None,
    context_len: int = 1 << 30,
) -> Profile:
    """Times both models' forwards as they are served. ``slots``: size of the KV pool, which is empty."""
    # Longer contexts than the models have positions for would read past their rotary tables.
    short = tuple(c for c in grid.contexts if c < context_len) or (max(1, context_len // 2),)
    grid = dataclasses.replace(grid, contexts=short)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        # Tensor-parallel ranks run the same forwards, so none may stop by its own clock.
        grid = dataclasses.replace(grid, stop_s=float("inf"))
    room = _Room(device, req_to_token, slots)
    try:
        verify = _sweep(room, _verify_step(device), grid.verify_tokens, 4, grid, progress, "verify")
        drafts = _sweep(room, _draft_step(device, width), grid.draft_rows, width, grid, progress, "draft")
    finally:
        room.leave()
    return Profile(draft=drafts, verify=verify, overhead_s=ENGINE_OVERHEAD_S)


Step = Callable[[TreeBatch], Any]


def _verify_step(device: Device) -> Step:
    return lambda batch: device.target.argmax(device.target.run(batch))


def _draft_step(device: Device, width: int) -> Step:
    return lambda batch: device.draft.candidates(batch, Reading.plain(np.ones(len(batch))), width)


@dataclass(frozen=True)
class _Room:
    """An empty pool, whose slots are lent to requests that are not there."""

    device: Device
    req_to_token: torch.Tensor
    slots: int

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

    def leave(self) -> None:
        self.req_to_token.zero_()


def _sweep(
    room: _Room,
    step: Step,
    sizes: Iterable[int],
    per_row: int,
    grid: Grid,
    progress: Callable[[str], None],
    what: str,
) -> np.ndarray:
    """(tokens, cached tokens, seconds) of forwards over ``sizes`` tokens, ``per_row`` of each request where
    that divides them: about as under load."""
    points = []
    for context in grid.contexts:
        for tokens in sizes:
            rows = max(1, tokens // per_row)
            q_lens = np.full(rows, tokens // rows, np.int64)
            if what == "verify":
                q_lens[: tokens % rows] += 1
            batch = room.batch(rows, q_lens, context)
            if batch is None:
                continue
            seconds = _time(room.device, step, batch, grid.repeats)
            points.append((len(batch), rows * context, seconds))
            progress(f"{what} {len(batch)} tokens, context {context}: {seconds * 1e3:.1f} ms")
            if seconds > grid.stop_s:
                break
    return np.array(points, np.float64)


def _time(device: Device, step: Step, batch: TreeBatch, repeats: int) -> float:
    """Least seconds of one forward: what others on the host take of its time is for the online correction to
    find out."""
    step(batch)
    times = []
    for _ in range(repeats):
        start = device.mark()
        step(batch)
        end = device.mark()
        device.synchronize()
        times.append(start.seconds_until(end))
    return min(times)


def fingerprint(target: str, draft: str, config: AdaServeConfig) -> dict[str, str]:
    """What a profile is valid for; models by name and size on disk."""
    import sglang

    return {
        "host": f"{platform.machine()} {cpu_name()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "target": _model_name(target),
        "draft": _model_name(draft),
        "weights": config.cpu_weights,
        "torch": torch.__version__,
        "sglang": sglang.__version__,
    }


def _model_name(path: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        return path
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return f"{folder.name} ({size} bytes)"


def profile_path(meta: dict[str, str]) -> Path:
    """Where ``adaserve profile`` keeps a profile by default."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    key = hashlib.sha256(repr(sorted(meta.items())).encode()).hexdigest()[:16]
    return root / "adaserve" / "profiles" / f"{key}.json"


def profile_steps() -> int:
    """Points of a full profile, at most."""
    return len(FULL.contexts) * (len(FULL.verify_tokens) + len(FULL.draft_rows))


def save_full_profile(
    meta: dict[str, str], run: Callable[[Grid, Callable[[str], None]], Profile]
) -> Path | None:
    """Measures and saves when `adaserve profile` asked for it; the file, else None."""
    if PROFILE_ENV not in os.environ:
        return None
    wanted = json.loads(os.environ[PROFILE_ENV])

    def tick(what: str) -> None:
        with open(wanted["ticks"], "a") as ticks:
            ticks.write(what + "\n")

    profile = run(FULL, tick)
    path = Path(wanted["out"]) if wanted["out"] else profile_path(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(profile, meta=meta).save(path)
    return path


def _model(profile: Profile) -> LatencyModel:
    """The best fit; for verification on a CPU a table, as kernels with row tiles have steps and a plateau."""
    model = fit_latency(profile).model
    if torch.cuda.is_available():
        return model
    return dataclasses.replace(model, verify=fit_table(profile.verify))


def load_or_measure(
    config: AdaServeConfig, meta: dict[str, str], measure_now: Callable[[], Profile]
) -> LatencyModel:
    """A saved profile where one fits (it says so when one does not), else a short measurement."""
    path = Path(config.profile) if config.profile else profile_path(meta)
    if path.is_file():
        try:
            profile = load_profile(path)
        except ProfileError:
            if config.profile:
                raise
            logger.warning("AdaServe: the cached profile %s is damaged; measuring anew", path)
        else:
            differs = [k for k, v in meta.items() if str(profile.meta.get(k)) != v]
            if differs:
                logger.warning(
                    "AdaServe: the profile %s was made with another %s; run `adaserve profile` here",
                    path,
                    ", ".join(differs),
                )
            return _model(profile)
    return _model(measure_now())

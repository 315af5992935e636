"""What a draft step and a verification cost on this host with these models.

A short measurement runs at every server start (about a second on the embedded pair); ``adaserve
profile`` runs a longer one and keeps it. Both measure the forwards that serving uses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from adaserve.cache import cache_folder
from adaserve.config import AdaServeConfig
from adaserve.engine.device import Device, Drafter, ModelForward
from adaserve.engine.host_load import OtherProcesses
from adaserve.engine.trees.batch import TreeBatch
from adaserve.host import cpu_name
from adaserve.scheduler.fit import fit_latency, fit_table
from adaserve.scheduler.interface import Context
from adaserve.scheduler.latency import LatencyModel, ProfileError
from adaserve.scheduler.profile import Profile, load_profile

logger = logging.getLogger(__name__)

ENGINE_OVERHEAD_S = 1.0e-3
"""SGLang's own time around an iteration, until one has been observed."""

BUSY_SHARE = 0.2
"""Above this share of the host's processors, other processes disturb a measurement."""

NO_DRAFT = 1e-3
"""Without a draft model its steps stand in a profile as this share of a verification: next to nothing."""

WIDTH = 3
"""Beams of each request that draft steps are measured with."""

LONGEST, LONGEST_TREE = 8192, 8
"""Cached tokens per request that are measured at most, and tokens that positions must be left for besides."""

FAR = 1.5
"""Beyond this ratio, two measurements of the same forwards differ by more than noise."""


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
        drafts = verify * (1.0, 1.0, 1.0, NO_DRAFT)
        if drafting:
            timed = _Timed(room, drafting, _draft_step(drafting), grid.repeats, progress, "draft")
            drafts = _sweep(timed, grid.draft_rows, WIDTH, grid)
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
    """Of all that drafts, one after the other."""
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
    longest: they tell sum L from sum q L (``fit_reading``)."""
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


def fingerprint(target: str, drafts: Sequence[str], config: AdaServeConfig) -> dict[str, str]:
    """What a profile is valid for; models by name and size on disk."""
    import sglang

    return {
        "host": f"{platform.machine()} {cpu_name()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "target": _model_name(target),
        "draft": " + ".join(map(_model_name, drafts)) or "none",
        "weights": f"{config.cpu_weights}, drafts {config.draft_weights}",
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
    return _cached("profiles", meta)


def learned_path(meta: dict[str, str]) -> Path:
    """Where a server keeps what it has learned."""
    return _cached("learned", meta)


def _cached(folder: str, meta: dict[str, str]) -> Path:
    key = hashlib.sha256(repr(sorted(meta.items())).encode()).hexdigest()[:16]
    return cache_folder() / folder / f"{key}.json"


def profile_steps() -> int:
    """Points of a full profile, at most."""
    return len(FULL.contexts) * (len(FULL.verify_tokens) + len(FULL.draft_rows))


def save_full_profile(
    meta: dict[str, str], run: Callable[[Grid, Callable[[str], None]], Profile], *, saves: bool
) -> Path | None:
    """Measures when `adaserve profile` asked for it, and where this rank ``saves``, saves; the file, else
    None."""
    if PROFILE_ENV not in os.environ:
        return None
    wanted = json.loads(os.environ[PROFILE_ENV])

    def tick(what: str) -> None:
        with open(wanted["ticks"], "a") as ticks:
            ticks.write(what + "\n")

    profile = run(FULL, tick if saves else lambda _: None)
    if not saves:
        return None
    path = Path(wanted["out"]) if wanted["out"] else profile_path(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(profile, meta=meta).save(path)
    learned_path(meta).unlink(missing_ok=True)  # older than this
    return path


def _model(profile: Profile) -> LatencyModel:
    """The best fit; for verification on a CPU a table, as kernels with row tiles have steps and a plateau."""
    model = fit_latency(profile).model
    if torch.cuda.is_available():
        return model
    return dataclasses.replace(model, verify=fit_table(profile.verify))


def start_model(
    config: AdaServeConfig, meta: dict[str, str], measure_now: Callable[[], Profile]
) -> LatencyModel:
    """What costs are learned from: the profile that was asked for; else what an earlier server has learned on
    this host, or its cached profile, or a short measurement.

    The measurement is made in any case, so that tensor-parallel ranks run the same forwards, and the kept
    costs are compared with it.
    """
    if config.profile:
        return _model(_read_profile(Path(config.profile), meta))
    others = OtherProcesses()
    measured = _model(measure_now())
    if (share := others.share()) > BUSY_SHARE:
        logger.warning(
            "AdaServe: other processes used %.0f%% of this host's processors while it was measured; "
            "the costs are corrected while it serves",
            100 * share,
        )
    kept = load_learned(learned_path(meta)) or _cached_profile(meta)
    return measured if kept is None else _more_likely(measured, kept)


def save_learned(meta: dict[str, str], model: LatencyModel) -> None:
    """Keeps what was learned for the next start."""
    path = learned_path(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**meta, "latency": model.to_json()}, indent=1) + "\n"
    # Not named after the process: servers in two containers have the same number, and perhaps the same cache.
    file, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
    try:
        with open(file, "w", encoding="utf-8") as part:
            os.fchmod(file, 0o644)
            part.write(text)
        os.replace(name, path)  # at once: a server that starts now reads the old costs or the new ones
    finally:
        Path(name).unlink(missing_ok=True)  # where the disk is full


def load_learned(path: Path) -> LatencyModel | None:
    """What an earlier server kept; None where there is nothing, or nothing readable."""
    try:
        model = LatencyModel.from_json(json.loads(path.read_text(encoding="utf-8"))["latency"])
        if model.verify_s(1.0) <= 0 or model.draft_step_s(1.0) <= 0:
            raise ProfileError("a forward that takes no time")
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a file, a server starts without it
        logger.warning("AdaServe: %s can't be read (%s); costs are learned from scratch", path, error)
        return None
    return model


def _more_likely(measured: LatencyModel, kept: LatencyModel) -> LatencyModel:
    """A forward can take longer than it has to but never less: of two that differ, the faster is right."""
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    ratio = float(np.median(measured.verify_s(sizes, Context(256.0)) / kept.verify_s(sizes, Context(256.0))))
    if ratio > FAR:
        logger.warning(
            "AdaServe: forwards take %.1f times as long as when this host was last known; it seems to be "
            "busy, so what was known then is the start",
            ratio,
        )
    elif ratio < 1 / FAR:
        logger.info("AdaServe: this host is %.1f times as fast as when it was last known", 1 / ratio)
        return measured
    return kept


def _cached_profile(meta: dict[str, str]) -> LatencyModel | None:
    path = profile_path(meta)
    try:
        return _model(_read_profile(path, meta)) if path.is_file() else None
    except Exception:  # whatever is wrong with it
        logger.warning("AdaServe: the cached profile %s is damaged", path)
        return None


def _read_profile(path: Path, meta: dict[str, str]) -> Profile:
    profile = load_profile(path)
    if differs := [k for k, v in meta.items() if str(profile.meta.get(k)) != v]:
        logger.warning(
            "AdaServe: the profile %s was made with another %s; the costs are corrected while it serves, "
            "and `adaserve profile` measures them here",
            path,
            ", ".join(differs),
        )
    return profile

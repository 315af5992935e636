"""Which costs a server starts with, and what it keeps for the next start: profiles and learned costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaserve.checkpoints.fingerprint import weight_files
from adaserve.config import AdaServeConfig
from adaserve.engine.costs.measure import FULL, Grid
from adaserve.engine.costs.other_processes import OtherProcesses
from adaserve.engine.cpu.build import load_kernels
from adaserve.host.cache import cache_folder
from adaserve.host.cores import usable_cores
from adaserve.host.description import cpu_name
from adaserve.host.files import write_json
from adaserve.scheduler.costs.fit import fit_latency, fit_table
from adaserve.scheduler.costs.latency import LatencyModel, ProfileError
from adaserve.scheduler.costs.profile import Profile, load_profile
from adaserve.scheduler.interface import Context

logger = logging.getLogger(__name__)

PROFILE_ENV = "ADASERVE_MEASURE_PROFILE"
"""Set by `adaserve profile`: JSON with the files for progress ("ticks") and result ("out")."""

BUSY_SHARE = 0.2
"""Above this share of the server's processors, other processes disturb a measurement."""

FAR = 1.5
"""Beyond this ratio, two measurements of the same forwards differ by more than noise."""


_OF_SERVER = (
    "tp_size", "dtype", "quantization", "speculative_draft_model_quantization", "speculative_token_map",
    "kv_cache_dtype", "disable_cuda_graph",
)  # fmt: skip
"""SGLang's settings that change what a forward costs."""


def cache_key(drafts: Sequence[str], config: AdaServeConfig, server_args: Any) -> dict[str, str]:
    """What a profile is valid for; models by name and size on disk. ``server_args``: SGLang's."""
    import sglang

    settings = [f"{name} {getattr(server_args, name)}" for name in _OF_SERVER]
    if config.attention == "flashinfer":  # what else it may say is one kernel
        settings.append("attention flashinfer")
    if not torch.cuda.is_available() and load_kernels() is None:
        settings.append("no CPU kernels")
    return {
        "host": f"{platform.machine()} {cpu_name()}",
        "cores": str(usable_cores()),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "target": _model_name(server_args.model_path),
        "draft": " + ".join(map(_model_name, drafts)) or "none",
        "weights": f"{config.cpu_weights}, drafts {config.draft_weights}",
        "settings": ", ".join(settings),
        "torch": torch.__version__,
        "sglang": sglang.__version__,
    }


def _model_name(path: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        return path
    size = sum(f.stat().st_size for f in weight_files(folder))
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


def save_full_profile(
    meta: dict[str, str], run: Callable[[Grid, Callable[[str], None]], Profile], *, saves: bool
) -> Path | None:
    """Measures if `adaserve profile` asked for it, and saves if this rank ``saves``. Returns the file, else
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
            "AdaServe: other processes used %.0f%% of this server's processors while it was measured; "
            "the costs are corrected while it serves",
            100 * share,
        )
    kept = load_learned(learned_path(meta)) or _cached_profile(meta)
    return measured if kept is None else _more_likely(measured, kept)


def save_learned(meta: dict[str, str], model: LatencyModel) -> None:
    """Keeps what was learned for the next start. A server that starts meanwhile reads the old costs or the
    new ones. Raises OSError."""
    path = learned_path(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**meta, "latency": model.to_json()})


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
    """A forward can take longer than it must but never less: of two models that differ, the faster is
    right."""
    sizes = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    ratio = float(np.median(measured.verify_s(sizes, Context(256.0)) / kept.verify_s(sizes, Context(256.0))))
    if ratio > FAR:
        logger.warning(
            "AdaServe: forwards take %.1f times as long as when their costs were saved; the host seems to be "
            "busy, so the saved costs are used until served traffic corrects them",
            ratio,
        )
    elif ratio < 1 / FAR:
        logger.info("AdaServe: this host is %.1f times as fast as when its costs were saved", 1 / ratio)
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

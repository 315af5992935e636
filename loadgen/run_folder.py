"""A results folder, read: everything is computed again from ``requests.jsonl``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from adaserve.host.files import why_unreadable
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.results import CONFIG, is_amount, iter_records
from adaserve.loadgen.server_comparison import Verdicts, compare
from adaserve.slo.run_summary import PLAYED, RequestRecord, summarize

_STAMP = re.compile(r"^\d{8}T\d{6}Z-")
_SEED = re.compile(r"[-_](seed|s)\d+$")

NOT_ENDED = "it was killed, or has not ended: there is no summary.json"
"""Why a run is not valid of which there is nothing but records."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One results folder, read."""

    folder: Path
    label: str
    summary: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, FloatArray]]  # class -> scheduled, attained, ratio, tpot, ttft
    command: str
    config: str
    env: Mapping[str, Any]
    verdicts: Mapping[str, Verdicts]  # class -> what the server said about the same requests


def read_run(folder: Path, label: str | None = None) -> Run:
    """Reads and summarizes a folder. Raises LoadgenError."""
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError) as e:
        raise LoadgenError(f"cannot read {str(folder)[:200]!r}: {why_unreadable(e)}") from e
    if not is_folder:
        raise LoadgenError(f"{folder} is not a results folder")
    records = list(iter_records(folder))
    if not records:
        raise LoadgenError(f"{folder}: requests.jsonl holds no requests")
    old = _summary_of_the_run(folder)
    played = {PLAYED: s} if is_amount(s := old.pop(PLAYED, None)) else None
    summary = summarize(records, old["warmup_s"], played)
    if not summary["by_class"]:
        raise LoadgenError(
            f"{folder}: all {len(records)} requests lie in the warm-up of {old['warmup_s']:g} s"
        )
    kept = {k: v for k, v in old.items() if k not in summary}
    # Reasons that only the run itself knew, such as a lost worker.
    reasons = list(dict.fromkeys([*summary["invalid_reasons"], *old["invalid_reasons"]]))
    summary |= kept | {"invalid_reasons": reasons, "valid": not reasons}
    counted = [r for r in records if r.judged and r.scheduled_s >= summary["warmup_s"]]
    classes = {name: [r for r in counted if r.slo_class == name] for name in summary["by_class"]}
    env = _json(folder / "env.json")
    return Run(
        folder=folder,
        label=label or default_label(folder),
        summary=summary,
        arrays={name: _arrays(rs) for name, rs in classes.items()},
        command=str(env.get("command") or summary.get("command") or "unknown"),
        config=_config_of_the_run(folder),
        env={k: v for k, v in env.items() if k != "command"},
        verdicts={name: compare(rs) for name, rs in classes.items()},
    )


def _arrays(records: Sequence[RequestRecord]) -> dict[str, FloatArray]:
    """As in ``Run.arrays``. What a failed request lacks is infinite, so that a curve ends below 1."""
    return {
        "scheduled": np.array([r.scheduled_s for r in records], float),
        "attained": np.array([r.attained for r in records], float),
        "ratio": np.array([_ratio(r) for r in records], float),
        "tpot": np.array([value_or(r.tpot_s if r.ok else None, math.inf) for r in records], float),
        "ttft": np.array([value_or(r.ttft_s if r.ok else None, math.inf) for r in records], float),
    }


def _ratio(record: RequestRecord) -> float:
    """TPOT / SLO. NaN without an SLO: there is nothing to compare with. An answer of one token, or of one
    chunk, has no TPOT and meets any SLO."""
    if record.slo_tpot_ms is None:
        return math.nan
    return value_or(record.tpot_ratio, 0.0) if record.ok else math.inf


def _summary_of_the_run(folder: Path) -> dict[str, Any]:
    """The usable part of ``summary.json``; everything else comes from the records. A run that has not written
    it, or was killed while it did, has a warm-up all the same."""
    old = _json(folder / "summary.json")
    if not old:
        old = {
            "warmup_s": _parsed(_config_of_the_run(folder)).get("warmup_s"),
            "invalid_reasons": [NOT_ENDED],
        }
    warmup_s, reasons = old.get("warmup_s"), old.get("invalid_reasons")
    old["warmup_s"] = float(warmup_s) if is_amount(warmup_s) else 0.0
    old["invalid_reasons"] = [str(r) for r in reasons] if isinstance(reasons, list) else []
    targets, server = old.pop("class_targets", None), old.pop("server", None)
    drafts = old.pop("learning", None)
    if isinstance(targets, dict):
        old["class_targets"] = {n: t for n, t in targets.items() if is_amount(t) and t <= 1}
    if isinstance(server, dict):
        old["server"] = {n: c for n, c in server.items() if _is_count(c)}
    if isinstance(drafts, dict):
        old["learning"] = {n: d for n, d in drafts.items() if _is_comparison(d)}
    return old


def _is_count(of_class: Any) -> bool:
    """Whether this is what the server counted of one class."""
    counted = of_class.get("all") if isinstance(of_class, dict) else None
    if not isinstance(counted, dict) or not is_amount(counted.get("requests")):
        return False
    return counted.get("attainment") is None or is_amount(counted["attainment"])


def _is_comparison(of_class: Any) -> bool:
    """Whether this says how much of the present and of the first draft is accepted."""
    return isinstance(of_class, dict) and all(is_amount(of_class.get(d)) for d in ("present", "first"))


def require_one_setting(runs: Sequence[Run]) -> None:
    """Unnamed runs count as seeds of one setting if their folders have the same name apart from time and
    seed, as all runs without a tag have. Raises LoadgenError if their load or their server differs."""
    first: dict[str, Run] = {}
    for run in (r for r in runs if r.label == default_label(r.folder)):
        other = first.setdefault(run.label, run)
        here, there = _setting(run.config), _setting(other.config)
        if differ := sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key)):
            raise LoadgenError(
                f"{other.folder} and {run.folder} would count as seeds of one setting, but differ in "
                f"{', '.join(differ)}: name each, as in NAME={run.folder}"
            )


def _setting(config: str) -> dict[str, Any]:
    """What seeds of one setting have in common: all but the seed, and what is measured before each."""
    setting = _parsed(config)
    server = setting.get("server")
    if isinstance(server, dict):
        setting["server"] = {k: v for k, v in server.items() if k != "continuous_usage"}
    return {k: v for k, v in setting.items() if k not in ("seed", "baseline_ms", "chars_per_token")}


def _parsed(config: str) -> dict[str, Any]:
    """Empty if that is no configuration."""
    try:
        data = yaml.safe_load(config)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _config_of_the_run(folder: Path) -> str:
    try:
        return (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not recorded"


def default_label(folder: Path) -> str:
    """``20260101T120000Z-adaserve-seed2`` -> ``adaserve``: seeds of one setting share a label."""
    name = _STAMP.sub("", folder.resolve().name)
    return _SEED.sub("", name) or name


def value_or(value: float | None, otherwise: float) -> float:
    """``otherwise`` for None."""
    return otherwise if value is None else value


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}

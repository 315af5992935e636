"""Measurements of a host: a small JSON file that ``adaserve profile`` writes::

    {"schema_version": 2, "device": "...", "target": "...", "draft": "...",
     "draft_points":  [{"rows": 8, "context": 1024, "requests": 4, "seconds": 0.0021}, ...],
     "verify_points": [{"tokens": 64, "context": 8192, "requests": 16, "seconds": 0.031}, ...],
     "overhead_s": 0.0008}

``rows`` are the tokens of one draft forward, ``tokens`` those of one target forward (roots
included), ``context`` is the sum of cached tokens over the batch (N_context, TurboSpec section 4) and
``requests`` is how many requests have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.checked import shown
from adaserve.host.files import write_json
from adaserve.scheduler.costs.latency import SCHEMA_VERSION, ProfileError, overhead_of
from adaserve.scheduler.interface import FloatArray


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured points; [k, 4] arrays of (rows or tokens, cached tokens in all, requests, seconds)."""

    draft: FloatArray
    verify: FloatArray
    overhead_s: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the schema of the module docstring."""
        body = {
            "schema_version": SCHEMA_VERSION,
            **self.meta,
            "draft_points": _points_out(self.draft, "rows"),
            "verify_points": _points_out(self.verify, "tokens"),
            "overhead_s": self.overhead_s,
        }
        # A server that starts meanwhile reads the earlier one or this one, and a full disk costs neither.
        write_json(path, body)


def _points_out(points: FloatArray, axis: str) -> list[dict[str, float]]:
    names = (axis, "context", "requests", "seconds")
    return [dict(zip(names, map(float, point), strict=True)) for point in points]


def _points_in(data: Mapping[str, Any], name: str, axis: str) -> FloatArray:
    raw = data.get(name)
    if not isinstance(raw, list) or not raw:
        raise ProfileError(f"profile needs a non-empty list {name!r}; run `adaserve profile`")
    try:
        rows = [[p[axis], p.get("context", 0), p.get("requests", 1), p["seconds"]] for p in raw]
        points = np.array(rows, dtype=np.float64)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ProfileError(f"{name}: every point needs {axis!r} and 'seconds' ({error})") from error
    if not np.isfinite(points).all() or (points[:, [0, 2]] < 1).any() or (points[:, 3] <= 0).any():
        raise ProfileError(
            f"{name}: {axis} and requests must be >= 1 and seconds finite and > 0; measure again"
        )
    return points


def validate_profile(data: Mapping[str, Any]) -> Profile:
    """Checks a parsed profile. Raises ProfileError naming the field and the remedy."""
    if not isinstance(data, Mapping):
        raise ProfileError(f"a profile is an object, got {shown(data)}; run `adaserve profile`")
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ProfileError(f"profile schema {version} is not {SCHEMA_VERSION}; run `adaserve profile` again")
    known = {"schema_version", "draft_points", "verify_points", "overhead_s"}
    return Profile(
        _points_in(data, "draft_points", "rows"),
        _points_in(data, "verify_points", "tokens"),
        overhead_of(data),
        {k: v for k, v in data.items() if k not in known},
    )


def load_profile(path: Path) -> Profile:
    """Reads and checks a profile file. Raises ProfileError with what to do."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"cannot read the latency profile {path} ({error.strerror}): write one with `adaserve profile`"
        ) from error
    except ValueError as error:  # no UTF-8, or no JSON
        raise ProfileError(f"{path} is not JSON ({error}): write it again with `adaserve profile`") from error
    try:
        return validate_profile(data)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error

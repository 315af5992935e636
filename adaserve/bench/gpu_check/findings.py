"""What a GPU check is to do and what it has found, on disk after every stage."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaserve.bench.gpu_check.answers import Answer
from adaserve.errors import why_not_new
from adaserve.server import ServerError

STATE_FILE = "gpu-check.state.json"
SCHEMA_VERSION = 8


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What to run."""

    batches: tuple[int, ...] = (1, 8, 32, 64)
    tokens: int = 64
    rounds: int = 3
    exact_prompts: int = 64
    mixed_s: float = 60.0
    loads: tuple[float, ...] = (0.5, 0.9, 1.3)  # requests offered, as shares of plain decoding's capacity
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) <= 0:
            raise ValueError(f"loads should be numbers above 0, not {list(self.loads)}")

    def turns(self, batch: int, drafts: bool) -> int:
        """Repetitions, each with other prompts: how well a draft guesses depends on the text, so few requests
        are asked more often where something ``drafts``."""
        return self.rounds * (max(1, 4 // batch) if drafts else 1)


@dataclass
class Findings:
    """Everything that was measured; JSON values. None = not measured, with the reason in ``skipped`` (a
    server) or ``failed`` (a stage)."""

    exact: dict[str, Any] = field(default_factory=dict)  # by server or policy
    tpot_ms: dict[str, dict[int, float]] = field(default_factory=dict)  # by server or policy, by batch
    accept_length: dict[str, dict[int, float]] = field(default_factory=dict)  # the same
    details: dict[str, Any] = field(default_factory=dict)  # iterations of the AdaServe server
    mixed: dict[str, Any] = field(default_factory=dict)  # by load, by server or policy
    profiles: dict[str, Any] = field(default_factory=dict)  # by batch
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    latency_model: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    reference: list[Answer] = field(default_factory=list)
    margin_noise: float | None = None  # of the reference's log-probabilities, by the shapes of kernels
    places: list[int] = field(default_factory=list)  # of the prompts that TPOT is measured with
    distinct_8grams: float | None = None  # share of what SGLang wrote after them; low = it loops
    done: list[str] = field(default_factory=list)  # stages, "server:stage"
    code: dict[str, list[str]] = field(default_factory=dict)  # by stage, that measured it: ``code_digest``


def resume(out: Path, identity: dict[str, Any]) -> Findings:
    """What earlier runs of the same check left in ``out``. Raises ServerError for another check's, and for
    the results of anything else."""
    path = out / STATE_FILE
    if not path.exists():
        if (why := why_not_new(out)) is not None:
            raise ServerError(why)
        return Findings()
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["identity"] != identity:
        what = ", ".join(_differing(kept["identity"], identity))
        raise ServerError(f"{out} holds a check with another {what}: give another --out, or remove it")
    found = Findings(**kept["found"])
    reference = kept["found"]["reference"]
    found.reference = [Answer(tuple(a["output_ids"]), tuple(a["margins"])) for a in reference]
    for table in (found.tpot_ms, found.accept_length, found.details):
        for name, values in table.items():
            if name != "verification":  # JSON has no numbers for keys
                table[name] = {int(batch): value for batch, value in values.items()}
    return found


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The settings that are not the same, as "plan.tokens"."""
    found = []
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{key}.{inner}" for inner in _differing(one, other)]
        elif one != other:
            found.append(key)
    return found


def code_digest() -> str:
    """Of the code that runs, committed or not: results of a check may come from more than one state of it."""
    digest = hashlib.sha256()
    for package in ("adaserve", "adaserve.patches", "adaserve.scheduler"):
        root = importlib.import_module(package).__path__[0]
        for path in sorted(Path(root).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]

"""The project's targets on a GPU host, and whether what was found meets them."""

from __future__ import annotations

from typing import Any

from adaserve.bench.gpu_check.findings import Findings
from adaserve.bench.gpu_check.servers import OWN, PLAIN

SPECULATING = ("priced", "adaserve")
"""Policies that the targets apply to; the default one first."""


def targets(found: Findings, dry: bool = False) -> list[dict[str, Any]]:
    """Each target with what was found, and whether it was met; None where it was not measured.

    ``dry``: on a CPU, where the measured speed means nothing: only exactness can be met or missed.
    """
    rows: list[dict[str, Any]] = []

    def add(what: str, value: float | None, holds: bool | None, timed: bool = True) -> None:
        holds = None if dry and timed else holds
        rows.append({"target": what, "value": None if value is None else round(value, 4), "met": holds})

    ours = {k: v for k, v in found.exact.items() if not k.startswith(PLAIN)}
    wrong = sum(len(v["different"]) for v in ours.values())
    add(
        "greedy outputs that differ from SGLang's other than by ties: 0",
        wrong,
        wrong == 0 if ours else None,
        False,
    )
    speedup = _ratio(found.tpot_ms.get(PLAIN, {}).get(1), _best_tpot(found, SPECULATING, 1))
    add("TPOT at batch 1 at least 2x better than without speculation", speedup, _at_least(speedup, 2.0))
    gain = _least_gain(found)
    add("TPOT at every batch at least as good as SGLang's own speculation", gain, _at_least(gain, 1.0))
    ratio = found.details.get("verification", {}).get("ratio")
    add("verification within 1.15x of as many plainly decoded tokens", ratio, _at_most(ratio, 1.15))
    shares = [outside_share(found.details.get(p, {}).get(32)) for p in SPECULATING]
    share = next((s for s in shares if s is not None), None)
    add("time outside of both models at most 8% at batch 32", share, _at_most(share, 0.08))
    highest = max(found.mixed, key=float, default=None)
    goodput = {} if highest is None else {k: v["token_goodput"] for k, v in found.mixed[highest].items()}
    best, theirs = (
        max((goodput[k] for k in names if k in goodput), default=None) for names in (SPECULATING, OWN)
    )
    gain = _ratio(best, theirs)
    add("goodput at the highest load above SGLang's own speculation", gain, _at_least(gain, 1.0))
    return rows


def outside_share(spent: dict[str, float] | None) -> float | None:
    """Share of the time from one decode iteration's end to the next one's in which neither model runs:
    SGLang's own work and the gaps around it count."""
    if not spent or not spent.get("loops") or not spent.get("iterations"):
        return None
    models_s = (spent["target_s"] + spent["draft_s"]) / spent["iterations"]
    return 1.0 - models_s / (spent["loop_s"] / spent["loops"])


def _best_tpot(found: Findings, names: tuple[str, ...], batch: int) -> float | None:
    return min((found.tpot_ms[n][batch] for n in names if batch in found.tpot_ms.get(n, {})), default=None)


def _least_gain(found: Findings) -> float | None:
    """Over SGLang's better tree, at the batch size where it is smallest."""
    batches = {b for name in OWN for b in found.tpot_ms.get(name, {})}
    gains = [_ratio(_best_tpot(found, OWN, b), _best_tpot(found, SPECULATING, b)) for b in batches]
    return min((g for g in gains if g is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _at_least(value: float | None, bound: float) -> bool | None:
    return None if value is None else value >= bound


def _at_most(value: float | None, bound: float) -> bool | None:
    return None if value is None else value <= bound

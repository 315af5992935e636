"""The project's targets on a GPU host, and whether what was found meets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaserve.bench.gpu_check.findings import CheckPlan, Findings
from adaserve.bench.gpu_check.systems import OWN, PLAIN, POLICIES, SPECULATING


def targets(found: Findings, plan: CheckPlan, dry: bool = False) -> list[dict[str, Any]]:
    """Each target with the ``value`` that was found, what is ``missing`` to judge it, and whether it was
    ``met``: None where something is missing and what is there does not miss it already.

    ``dry``: on a CPU, where the measured speed means nothing: only exactness can be met or missed.
    """
    rows: list[dict[str, Any]] = []

    def add(
        what: str, value: float | None, holds: bool | None, missing: Sequence[str] = (), timed: bool = True
    ) -> None:
        met = None if (missing and holds) or (dry and timed) else holds
        rows.append({"target": what, "value": None if value is None else round(value, 4), "met": met,
                     "missing": list(missing)})  # fmt: skip

    ours = {p: found.exact[p] for p in POLICIES if p in found.exact}
    wrong = sum(len(v["different"]) for v in ours.values()) if ours else None
    less = [p for p in POLICIES if p not in ours or ours[p]["requests"] < plan.exact_prompts]
    what = "greedy outputs that differ from SGLang's other than by ties: 0"
    add(what, wrong, _at_most(wrong, 0), [f"outputs of {policy}" for policy in less], timed=False)
    plain, best = found.tpot_ms.get(PLAIN, {}).get(1), _best_tpot(found, SPECULATING, 1)
    less = [name for name, ms in ((PLAIN, plain), (SPECULATING[0], best)) if ms is None]
    speedup, what = _ratio(plain, best), "TPOT at batch 1 at least 2x better than without speculation"
    add(what, speedup, _at_least(speedup, 2.0), [f"TPOT of {name} at batch 1" for name in less])
    gain, less = _least_gain(found, plan)
    what = "TPOT at every batch at least as good as SGLang's own speculation"
    add(what, gain, _at_least(gain, 1.0), less)
    ratio = found.details.get("verification", {}).get("ratio")
    less = ["device times of verifications"] if ratio is None else []
    what = "verification within 1.15x of as many plainly decoded tokens"
    add(what, ratio, _at_most(ratio, 1.15), less)
    shares = [outside_share(found.details.get(p, {}).get(32)) for p in SPECULATING]
    share = next((s for s in shares if s is not None), None)
    less = ["times of iterations at batch 32"] if share is None else []
    add("time outside of both models at most 8% at batch 32", share, _at_most(share, 0.08), less)
    gain, less = _goodput_gain(found, plan)
    what = "goodput at the highest load above SGLang's own speculation"
    add(what, gain, None if gain is None else gain > 1.0, less)
    return rows


def outside_share(spent: dict[str, float] | None) -> float | None:
    """Share of the time from one decode iteration's end to the next one's in which neither model runs:
    SGLang's own work and the gaps around it count. Of the same iterations, none of them after a prefill."""
    if not spent or not spent.get("loop_s"):
        return None
    return 1.0 - spent["loop_models_s"] / spent["loop_s"]


def _best_tpot(found: Findings, names: tuple[str, ...], batch: int) -> float | None:
    return min((found.tpot_ms[n][batch] for n in names if batch in found.tpot_ms.get(n, {})), default=None)


def _least_gain(found: Findings, plan: CheckPlan) -> tuple[float | None, list[str]]:
    """Over SGLang's better tree, at the batch size where it is smallest, and what is missing of it."""
    gains, missing = [], []
    for batch in plan.batches:
        ours, theirs = (_best_tpot(found, names, batch) for names in (SPECULATING, OWN))
        gains.append(_ratio(theirs, ours))
        names = [n for n in OWN if batch not in found.tpot_ms.get(n, {})]
        names += [SPECULATING[0]] if ours is None else []
        missing += [f"TPOT of {name} at batch {batch}" for name in names]
    return min((g for g in gains if g is not None), default=None), missing


def _goodput_gain(found: Findings, plan: CheckPlan) -> tuple[float | None, list[str]]:
    """Over SGLang's better tree, at the highest load of the plan, and what is missing of it. A run that is
    no valid measurement is missing."""
    load = f"{max(plan.loads):g}"
    runs = {k: v for k, v in found.mixed.get(load, {}).items() if not v.get("invalid_reasons")}
    best, theirs = (
        max((runs[n]["token_goodput"] for n in names if n in runs), default=None)
        for names in (SPECULATING, OWN)
    )
    names = [n for n in OWN if n not in runs] + ([SPECULATING[0]] if best is None else [])
    return _ratio(best, theirs), [f"goodput of {name} at load {load}" for name in names]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _at_least(value: float | None, bound: float) -> bool | None:
    return None if value is None else value >= bound


def _at_most(value: float | None, bound: float) -> bool | None:
    return None if value is None else value <= bound

"""The length of systems that have one to choose: what attained most on the tuning seed, load by load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adaserve.bench.sweep.plan import TUNING_SEED, Case, Point, SweepError
from adaserve.bench.sweep.systems import bare, family, with_length

Lines = Mapping[str, Mapping[str, Any]]
"""Lines of ``cases.jsonl``, by id."""


def chosen_length(lines: Lines, name: str, load: float, lengths: Sequence[int]) -> int:
    """The best length of ``chain`` or ``chain+gate`` at the nearest tuned load; of ties, by the goodput.

    Raises SweepError while none was tried."""
    found: dict[float, list[tuple[float, float, int]]] = {}
    for length in lengths:
        for tried, line in _tuned(lines, with_length(name, length)):
            total = line["all"]
            figures = (total["slo_attainment"] or 0.0, total["token_goodput"] or 0.0, -length)
            found.setdefault(tried, []).append(figures)
    if not found:
        raise SweepError(
            f"no length of {name!r} was tried: let the sweep run on, or name one, as in {name}-2"
        )
    return -max(found[min(found, key=lambda tried: abs(tried - load))])[2]


def _tuned(lines: Lines, policy: str) -> Iterable[tuple[float, Mapping[str, Any]]]:
    for line in lines.values():
        if line["seed"] == TUNING_SEED and line["policy"] == policy:
            yield Point.parse(line["point"]).load, line


def setting_of(case: Case, lines: Lines, lengths: Sequence[int]) -> str:
    """The system that plays the case: a family's name gets its length."""
    if family(case.policy) is None:
        return case.policy
    return with_length(case.policy, chosen_length(lines, case.policy, case.point.load, lengths))


def chosen_text(lines: Lines) -> str:
    """``chain: 4 at load 0.3, 2 at load 0.9; ...``, as they were played; empty if nothing was chosen."""
    picks: dict[str, dict[float, str]] = {}
    for line in lines.values():
        if family(line["policy"]) is not None:
            length = bare(line["setting"]).rpartition("-")[2]
            picks.setdefault(line["policy"], {})[Point.parse(line["point"]).load] = length
    each = (
        f"{name}: {', '.join(f'{length} at load {load:g}' for load, length in sorted(found.items()))}"
        for name, found in sorted(picks.items())
    )
    return "; ".join(each)

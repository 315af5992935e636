"""Which length each family gets: the one that attained most on the tuning seed, load by load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adaserve.bench.sweep.plan import TUNING_SEED, Case, Point, SweepError
from adaserve.bench.sweep.systems import FAMILIES, family, with_length

Lines = Mapping[str, Mapping[str, Any]]
"""Of ``cases.jsonl``, by id."""


def chosen_length(lines: Lines, name: str, load: float, lengths: Sequence[int]) -> int:
    """The family's best length at the tuned load that is nearest. Ties go to the higher goodput.

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


def concrete(case: Case, lines: Lines, lengths: Sequence[int]) -> str:
    """The system that plays the case: a family's name gets its length."""
    name = family(case.policy)
    if name is None:
        return case.policy
    return with_length(case.policy, chosen_length(lines, name, case.point.load, lengths))


def chosen_text(lines: Lines, loads: Sequence[float], lengths: Sequence[int]) -> str:
    """``chain: 4 at load 0.3, 2 at load 0.9; ...`` for the results; empty where nothing was chosen."""
    parts = []
    for name in FAMILIES:
        try:
            picks = [f"{chosen_length(lines, name, load, lengths)} at load {load:g}" for load in loads]
        except SweepError:
            continue
        parts.append(f"{name}: {', '.join(picks)}")
    return "; ".join(parts)

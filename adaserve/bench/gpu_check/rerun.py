"""Stages that are to be measured again, and what goes with their old results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adaserve.bench.gpu_check.findings import Findings
from adaserve.bench.gpu_check.systems import ADASERVE, PLAIN, POLICIES


def forget(found: Findings, stage: str) -> set[str]:
    """Takes out of ``found`` what ``stage`` has measured, and what was measured by it: outputs of all servers
    are compared with SGLang's, and all mixed loads follow from its speed. Returns the stages that are not
    done any more."""
    server, _, name = stage.partition(":")
    gone, names = {stage}, POLICIES if server == ADASERVE else (server,)
    match name.partition("-"):
        case ("exactness", *_) if server == PLAIN:
            found.reference, found.margin_noise, found.exact = [], None, {}
            gone |= {other for other in found.done if other.endswith(":exactness")}
        case ("exactness", *_):
            _drop(found.exact, names)
        case ("speed", *_):
            for table in (found.tpot_ms, found.accept_length, found.details):
                _drop(table, names)
            if server == PLAIN:
                found.mixed = {}
                gone |= {other for other in found.done if other.partition(":")[2].startswith("mixed")}
        case ("verification", *_):
            _drop(found.details, {"verification"})
        case ("profile", *_):
            found.profiles = {}
        case ("mixed", _, policy):
            for of_load in found.mixed.values():
                _drop(of_load, {policy or server})
    found.done = [other for other in found.done if other not in gone]
    for table in (found.failed, found.code):
        _drop(table, gone)
    return gone


def _drop(table: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        table.pop(name, None)

"""Recording of iterations and their replay: the engine and a policy object must select the same nodes.

One JSON object per line (gzip when the name ends in .gz)::

    {"iteration": 7, "now_s": ..., "running": {...}, "plan": {...}, "trees": {...},
     "selection": {"keep": "0110...", "slo_counts": [...]}, "outcome": {...}}

Arrays are lists; infinities are the strings "inf" and "-inf". In between are ``{"forget": rid}`` for requests
that ended, and ``{"prefill": {"tokens": ..., "seconds": ...}}`` for forwards of prompts alone.

A learning policy is replayed faithfully only from the first iteration on, with all outcomes and in the order
of events: ``observed`` tells how many outcomes had arrived when an iteration was planned, and
``observed_by_selection`` how many when its nodes were selected (overlap).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from adaserve.errors import UserError
from adaserve.scheduler.interface import (
    CandidateTrees,
    DraftPlan,
    IterationOutcome,
    IterationPlan,
    Policy,
    RunningBatch,
    Selection,
)

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 3
FLUSH_EVERY = 16
"""Iterations after which a compressed recording is written out; more often would compress worse."""


class ReplayError(UserError, ValueError):
    """A recording can't be read; the text says where and what to do."""


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """One iteration of a recording."""

    plan: IterationPlan
    trees: CandidateTrees
    selection: Selection
    outcome: IterationOutcome
    observed: int  # outcomes known when it was planned
    observed_by_selection: int  # outcomes known when its nodes were selected


@dataclass(frozen=True, slots=True)
class RecordedPrefill:
    """A forward of prompts alone, by the target and the draft."""

    tokens: int  # without those that were cached
    seconds: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a replay differed."""

    iteration: int
    field: str  # draft.depth | draft.width | draft.branching | budget | takes_all | keep
    recorded: str
    replayed: str


def _out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.bool_:
            return "".join("1" if v else "0" for v in value.tolist())
        return [_out(v) for v in value.tolist()]
    if isinstance(value, CandidateTrees | DraftPlan):
        return _fields_out(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _fields_out(obj: Any, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    return {f.name: _out(getattr(obj, f.name)) for f in fields(obj) if f.name not in skip}


class Recorder:
    """Writes a line for each iteration, once its outcome is known.

    A recording is that of one process from its start on. So if ``path`` exists, from an earlier start or
    another replica, this one is called ``NAME-2``, ``NAME-3`` and so on."""

    def __init__(self, path: Path) -> None:
        self._file = _new(path)
        self._observed = 0
        # Outcomes at plan and selection. Not by iteration, which every policy counts for itself.
        self._known: dict[int, list[int]] = {}
        self._failed = False
        self._file.write(json.dumps({"schema_version": SCHEMA_VERSION}) + "\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def planned(self, plan: IterationPlan) -> None:
        """Call right after ``policy.plan``: notes how many outcomes it knew."""
        self._known[id(plan)] = [self._observed]

    def selected(self, plan: IterationPlan) -> None:
        """Call right after ``policy.select``: notes the same."""
        self._known[id(plan)].append(self._observed)

    def observed(self, outcome: IterationOutcome) -> None:
        """Call right after ``policy.observe``: writes the line."""
        plan = outcome.plan
        at_plan, at_selection = self._known.pop(id(plan))
        body = {
            "iteration": plan.iteration,
            "observed": at_plan,
            "observed_by_selection": at_selection,
            "running": _fields_out(plan.running),
            "plan": _fields_out(plan, ("running",)),
            "trees": _fields_out(outcome.trees),
            "selection": _fields_out(outcome.selection),
            "outcome": _fields_out(outcome, ("plan", "trees", "selection")),
        }
        self._observed += 1
        self._write(body, flush=self._observed % FLUSH_EVERY == 0)

    def forget(self, rid: str) -> None:
        """Call with ``policy.forget``: a replay forgets at the same point."""
        self._write({"forget": rid})

    def prefilled(self, prefill: RecordedPrefill) -> None:
        """A forward of prompts alone: no part of an iteration, so a replay passes over it."""
        self._write({"prefill": _fields_out(prefill)})

    def _write(self, line: dict[str, Any], *, flush: bool = False) -> None:
        if self._failed:
            return  # what comes after a gap could not be replayed
        try:
            self._file.write(json.dumps(line) + "\n")
            if flush:
                self._file.flush()
        except OSError as error:  # a full disk must not end the server
            self._failed = True
            logger.warning("AdaServe: iterations are no longer recorded: %s", error)

    def close(self) -> None:
        """Flushes and closes."""
        with contextlib.suppress(OSError) if self._failed else contextlib.nullcontext():
            self._file.close()


def _new(path: Path) -> IO[str]:
    """A file that was not there before."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    for number in itertools.count(1):
        end = "" if number == 1 else f"-{number}"
        own = path.with_name(f"{plain.stem}{end}{plain.suffix}{'.gz' * (path.suffix == '.gz')}")
        with contextlib.suppress(FileExistsError):
            file = _open(own, "xt")
            if number > 1:
                logger.warning("AdaServe: %s holds another recording; this one is %s", path, own.name)
            return file
    raise AssertionError


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    # Line by line: a server that is killed has lost at most the line it was writing. A compressed recording
    # loses up to FLUSH_EVERY iterations.
    return open(path, mode.removesuffix("t"), buffering=1, encoding="utf-8")


_INTS = {"decoded_tokens", "context_tokens", "remaining_tokens", "max_depth", "row_start", "token", "parent"}
_INTS |= {"depth", "counts", "slo_counts", "new_tokens", "cap", "source", "likely_tokens", "window"}
_FLOATS = {"tpot_slo_s", "decode_start_s", "temperature", "weight", "logprob", "expected_tokens"}
_BOOLS = {"keep", "accepted", "rows"}
_PARTS: dict[str, type] = {
    "offered": CandidateTrees,
    "underway": DraftPlan,
    "draft": DraftPlan,
    "then": DraftPlan,
}


def _in(name: str, value: Any) -> Any:
    if name in _BOOLS and isinstance(value, str):
        return np.array([c == "1" for c in value], np.bool_)
    if isinstance(value, list):
        if name in _INTS:
            return np.array(value, np.int64)
        if name in _FLOATS:
            return np.array([float(v) for v in value], np.float64)
        return tuple(value)
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _fields_in(data: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _PARTS[name](**_fields_in(value)) if isinstance(value, dict) else _in(name, value)
        for name, value in data.items()
    }


def _whole_lines(file: IO[str]) -> Iterator[str]:
    """Lines that are complete: a recording ends when its server does, perhaps within a line or a compressed
    block."""
    with contextlib.suppress(EOFError):
        for line in file:
            if line.endswith("\n"):
                yield line


def read_events(path: Path) -> Iterator[RecordedIteration | RecordedPrefill | str]:
    """Iterations of a recording in the order of their outcomes; in between, prefills (not in recordings of
    earlier versions) and requests that were forgotten. Raises ReplayError."""
    try:
        with _open(path, "rt") as f:
            for number, line in enumerate(_whole_lines(f), 1):
                try:
                    data = json.loads(line)
                    if "schema_version" in data:
                        if data["schema_version"] != SCHEMA_VERSION:
                            raise ReplayError(f"{path} is of another version of AdaServe: record it again")
                        continue
                    if "forget" in data:
                        yield data["forget"]
                    elif "prefill" in data:
                        read = data["prefill"]
                        yield RecordedPrefill(int(read["tokens"]), float(read["seconds"]))
                    else:
                        yield _iteration(data)
                except (KeyError, TypeError, json.JSONDecodeError) as error:
                    raise ReplayError(
                        f"{path}:{number} is not a recorded iteration ({error}): record it again"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"cannot read the recording {path}: {error}") from error


def _iteration(data: dict[str, Any]) -> RecordedIteration:
    running = RunningBatch(**_fields_in(data["running"]))
    plan = IterationPlan(running=running, **_fields_in(data["plan"]))
    trees = CandidateTrees(**_fields_in(data["trees"]))
    selection = Selection(**_fields_in(data["selection"]))
    outcome = IterationOutcome(plan, trees, selection, **_fields_in(data["outcome"]))
    known = int(data["observed"]), int(data["observed_by_selection"])
    return RecordedIteration(plan, trees, selection, outcome, *known)


def read_recording(path: Path) -> Iterator[RecordedIteration]:
    """Only the iterations of a recording. Raises ReplayError."""
    return (event for event in read_events(path) if isinstance(event, RecordedIteration))


def replay(path: Path, policy: Policy) -> list[Mismatch]:
    """Feeds a recording to a fresh policy and compares plans and selections; empty = identical."""
    events = deque(event for event in read_events(path) if not isinstance(event, RecordedPrefill))
    iterations = [e for e in events if isinstance(e, RecordedIteration)]
    mismatches: list[Mismatch] = []
    known = 0

    def catch_up(observed: int) -> None:
        nonlocal known
        while events and (known < observed or isinstance(events[0], str)):
            event = events.popleft()
            if isinstance(event, str):
                policy.forget(event)
            else:
                policy.observe(event.outcome)
                known += 1

    for item in sorted(iterations, key=lambda e: e.plan.iteration):
        catch_up(item.observed)
        plan = policy.plan(item.plan.running, item.plan.now_s)
        mismatches += _compare_plans(item.plan, plan)
        catch_up(item.observed_by_selection)
        chosen = policy.select(plan, item.trees)
        if not np.array_equal(chosen.keep, item.selection.keep):
            difference = np.flatnonzero(chosen.keep != item.selection.keep)
            mismatches.append(Mismatch(item.plan.iteration, "keep", "nodes", str(difference[:8].tolist())))
    return mismatches


def _compare_plans(recorded: IterationPlan, replayed: IterationPlan) -> list[Mismatch]:
    return [
        Mismatch(recorded.iteration, name, str(a), str(b))
        for name in ("draft.depth", "draft.width", "draft.branching", "budget", "takes_all")
        if (a := attrgetter(name)(recorded)) != (b := attrgetter(name)(replayed))
    ]

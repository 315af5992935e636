"""Reads traces: the project's JSONL, and public formats.

Those are Azure CSV (public and simplified), BurstGPT CSV, the AdaServe artifact's JSON and its simplified
JSONL. ``.gz`` files are read as they are. Every problem is a :class:`TraceError` that names file and line.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaserve.host.files import UNREADABLE, json_lines, not_utf8, read_text, why_unreadable
from adaserve.slo.classes import CUSTOM_CLASS
from adaserve.slo.trace import EPOCH_S, Trace, TraceError, TraceRow

MAX_TOKENS = 10_000_000


def read_trace(path: str | Path, fmt: str = "auto", sort: bool = False) -> Trace:
    """Reads a trace file. ``fmt`` is one of FORMATS or "auto" (decided by the first line).

    Rows must be sorted by time from 0 on; ``sort=True`` sorts them instead of refusing. So are those that a
    server has recorded, in the order in which they ended, by the time of the epoch. Raises TraceError."""
    path = Path(path)
    try:
        text = read_text(path)
    except UNREADABLE as e:
        raise TraceError(f"cannot read the trace {path}: {why_unreadable(e)}") from e
    name = detect_format(text, str(path)) if fmt == "auto" else fmt
    if name not in FORMATS:
        raise TraceError(f"unknown trace format {name!r}: known are auto, {', '.join(FORMATS)}")
    located, row_of = FORMATS[name]
    rows: list[TraceRow] = []
    for where, data in located(text, str(path)):
        if (row := row_of(data, where)) is None:
            continue
        rows.append(_checked(row, where))
        recorded = rows[0].arrival_s > EPOCH_S and name not in _CLOCKS
        if not sort and not recorded:
            _require_order(rows, where)
    if not rows:
        raise TraceError(f"{path} holds no requests")
    rows.sort(key=lambda r: r.arrival_s)
    if name in _CLOCKS:
        first_s = rows[0].arrival_s
        rows = [replace(r, arrival_s=r.arrival_s - first_s) for r in rows]
    return Trace(tuple(rows), str(path))


def _require_order(rows: Sequence[TraceRow], where: str) -> None:
    if len(rows) > 1 and (back_s := rows[-2].arrival_s - rows[-1].arrival_s) > 0:
        raise TraceError(
            f"{where}: timestamps go back by {back_s:g} s: sort the file, or ask for sorting (sort: true "
            "under trace: in the configuration)"
        )


def detect_format(text: str, path: str) -> str:
    """Names the format of a trace by how it starts. Raises TraceError."""
    first = text.lstrip()[:1]
    line = text.lstrip().split("\n", 1)[0].strip()
    if first == "[":
        return "adaserve"
    if first == "{":
        return "adaserve-jsonl" if '"arrival_s"' in line else "jsonl"
    columns = [c.strip(' "').lower() for c in line.split(",")]
    if columns[:1] == ["timestamp"] and "contexttokens" in columns:
        return "azure"
    if "request tokens" in columns:
        return "burstgpt"
    if {"arrival_s", "prompt_tokens", "output_tokens"} <= set(columns):
        return "csv"
    raise TraceError(
        f"{path}: this is not a known trace format (its first line is {line[:80]!r}): formats are "
        f"{', '.join(FORMATS)}"
    )


Located = Iterator[tuple[str, Mapping[str, Any]]]
"""The rows of a file as they stand there, each with its place."""
RowOf = Callable[[Mapping[str, Any], str], TraceRow | None]
"""Reads one of them, at this place; None for what is no request."""


def _jsonl(text: str, path: str) -> Located:
    for number, line in enumerate(json_lines(text), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as e:  # a number of 5000 digits, endless brackets
            raise TraceError(f"{where}: not a JSON object: {e}") from e
        yield where, _object(data, where)


def _array(text: str, path: str) -> Located:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise TraceError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(items, list):
        raise TraceError(f"{path}: expected a JSON array, got {type(items).__name__}")
    for number, data in enumerate(items):
        where = f"{path}[{number}]"
        yield where, _object(data, where)


def _object(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TraceError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data


def _table(text: str, path: str) -> Located:
    reader = csv.reader(io.StringIO(text))
    lines = _lines(reader, path)
    columns = [c.strip().lower() for c in next(lines, [])]
    if twice := sorted({c for c in columns if columns.count(c) > 1}):
        raise TraceError(f"{path}: the header names {twice[0]!r} twice: leave one of the columns out")
    for values in lines:
        if not any(v.strip() for v in values):
            continue
        where = f"{path}:{reader.line_num}"
        if len(values) != len(columns):
            raise TraceError(f"{where}: {len(values)} columns where the header has {len(columns)}")
        yield where, dict(zip(columns, (v.strip() for v in values), strict=True))


def _lines(reader: Iterator[list[str]], path: str) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as e:
        raise TraceError(f"{path}: not a table: {e}") from e


def _ours(data: Mapping[str, Any], where: str) -> TraceRow:
    session = data.get("session_id")
    return TraceRow(
        arrival_s=_number(data, "timestamp", where) / 1e3,
        prompt_tokens=_count(data, "input_length", where),
        output_tokens=_count(data, "output_length", where),
        slo_class=data.get("slo_class"),
        slo_tpot_ms=_optional(data, "slo_tpot_ms", where),
        slo_x_baseline=_optional(data, "slo_x_baseline", where),
        slo_ttft_ms=_optional(data, "slo_ttft_ms", where),
        session_id=None if session is None else str(session),
        text=data.get("text_input"),
        prompt_id=data.get("prompt_id"),
    )


def _simplified_artifact(data: Mapping[str, Any], where: str) -> TraceRow:
    kind, value = data.get("slo_kind"), _optional(data, "slo_value", where)
    if kind not in ("x_baseline", "abs_ms", None):
        raise TraceError(f"{where}: slo_kind {kind!r} is neither x_baseline nor abs_ms")
    return TraceRow(
        arrival_s=_number(data, "arrival_s", where),
        prompt_tokens=_count(data, "prompt_tokens", where),
        output_tokens=_count(data, "output_tokens", where),
        slo_class=data.get("category"),
        slo_tpot_ms=value if kind == "abs_ms" else None,
        slo_x_baseline=value if kind == "x_baseline" else None,
        prompt_id=data.get("prompt_id"),
    )


def _artifact(data: Mapping[str, Any], where: str) -> TraceRow:
    """``slo_ratio`` > 0 is a multiple of the baseline (coding), < 0 is minus the TPOT in ms (the artifact's
    datasets: -50 chat, -150 summarization)."""
    ratio = _number(data, "slo_ratio", where)
    slo_class = "coding" if ratio > 0 else {-50.0: "chat", -150.0: "summarization"}.get(ratio)
    return TraceRow(
        arrival_s=_number(data, "emission_time_ms", where) / 1e3,
        prompt_tokens=_count(data, "input_length", where),
        output_tokens=_count(data, "output_length", where),
        slo_class=slo_class or CUSTOM_CLASS,
        slo_tpot_ms=-ratio if ratio < 0 else None,
        slo_x_baseline=ratio if ratio > 0 else None,
        text=data.get("prompt"),
    )


def _simplified_azure(data: Mapping[str, Any], where: str) -> TraceRow:
    return TraceRow(
        arrival_s=_number(data, "arrival_s", where),
        prompt_tokens=_count(data, "prompt_tokens", where),
        output_tokens=_count(data, "output_tokens", where),
    )


def _azure(data: Mapping[str, Any], where: str) -> TraceRow:
    return TraceRow(
        arrival_s=_azure_time(_given(data, "timestamp", where), where),
        prompt_tokens=_count(data, "contexttokens", where),
        output_tokens=_count(data, "generatedtokens", where),
    )


def _azure_time(text: str, where: str) -> float:
    """Seconds of ``2023-11-16 18:15:46.6805900``, in UTC unless it names another zone."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as e:
        raise TraceError(f"{where}: {text!r} is not a time such as 2023-11-16 18:15:46.6805900") from e
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp()


def _burstgpt(data: Mapping[str, Any], where: str) -> TraceRow | None:
    """None for a request that failed there."""
    if _number(data, "response tokens", where) == 0:
        return None
    return TraceRow(
        arrival_s=_number(data, "timestamp", where),
        prompt_tokens=_count(data, "request tokens", where),
        output_tokens=_count(data, "response tokens", where),
        session_id=data.get("session id") or None,
    )


FORMATS: Mapping[str, tuple[Callable[[str, str], Located], RowOf]] = {
    "jsonl": (_jsonl, _ours),
    "mooncake": (_jsonl, _ours),
    "azure": (_table, _azure),
    "csv": (_table, _simplified_azure),
    "burstgpt": (_table, _burstgpt),
    "adaserve": (_array, _artifact),
    "adaserve-jsonl": (_jsonl, _simplified_artifact),
}
"""How a file is taken apart, and what a row of it says."""

_CLOCKS = ("azure", "burstgpt")
"""Formats whose times come from a clock: they count from the first request kept."""


def _given(data: Mapping[str, Any], key: str, where: str) -> Any:
    value = data.get(key)
    if value is None or value == "":
        found = ", ".join(repr(k) for k in list(data)[:8])
        raise TraceError(
            f"{where}: {key!r} is missing: rename the column that holds it (found: {found or 'nothing'})"
        )
    return value


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    value = _given(data, key, where)
    try:
        number = math.nan if isinstance(value, bool | list | dict) else float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise TraceError(f"{where}: {key!r} is {str(value)[:40]!r}, expected a finite number")
    return number


def _optional(data: Mapping[str, Any], key: str, where: str) -> float | None:
    return None if data.get(key) is None else _number(data, key, where)


def _count(data: Mapping[str, Any], key: str, where: str) -> int:
    number = _number(data, key, where)
    if number != int(number) or not 1 <= number <= MAX_TOKENS:
        raise TraceError(f"{where}: {key!r} is {number:g}, expected a whole number of tokens from 1 on")
    return int(number)


def _checked(row: TraceRow, where: str) -> TraceRow:
    if row.arrival_s < 0:
        raise TraceError(f"{where}: the timestamp is {row.arrival_s:g} s: a trace starts at 0")
    for key in ("slo_class", "text", "prompt_id", "session_id"):
        value = getattr(row, key)
        if not isinstance(value, str | None):
            raise TraceError(f"{where}: {key} must be text, not {value!r}")
        if value is not None and (odd := not_utf8(value)) is not None:
            raise TraceError(f"{where}: {key} holds {odd!r}, not a character of UTF-8")
    if not (row.slo_class or "").isprintable():
        raise TraceError(f"{where}: slo_class must be text in one line, not {row.slo_class!r}")
    for key in ("slo_tpot_ms", "slo_x_baseline", "slo_ttft_ms"):
        value = getattr(row, key)
        if value is not None and value <= 0:
            raise TraceError(f"{where}: {key} is {value:g}, expected more than 0")
    return row

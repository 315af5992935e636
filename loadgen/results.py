"""The folder of a run: ``config.yaml, env.json, requests.jsonl, summary.json``."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from adaserve.errors import why_not_new
from adaserve.host.description import describe_host
from adaserve.host.files import write_json
from adaserve.loadgen.errors import LoadgenError
from adaserve.redaction import without_secrets
from adaserve.slo.run_summary import PREDICTED, RequestRecord, read_records, summarize

CONFIG = "config.yaml"
"""The first file of a results folder."""
KILLED = "the load generator was killed"
"""Why a run is not valid when something other than its user ended it."""
COMMAND_VARIABLE = "ADASERVE_BENCH_COMMAND"
"""Set by a process that starts this one: the command that the user typed."""
HEADERS_VARIABLE = "ADASERVE_BENCH_HEADERS"
"""HTTP headers (JSON) that must not be written to files: keys."""


def new_results_dir(root: Path, tag: str) -> Path:
    """``root/<UTC>-<tag>``, not yet existing."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = root / f"{stamp}-{tag}"
    suffix = 1
    while path.exists():
        suffix += 1
        path = root / f"{stamp}-{tag}-{suffix}"
    return path


def check_results_dir(out: Path) -> None:
    """Raises LoadgenError when ``out`` cannot take a new run: results are not overwritten."""
    if (why := why_not_new(out)) is not None:
        raise LoadgenError(why)


def make_results_dir(out: Path) -> None:
    """Creates the folder of a run, which is the run's alone from then on: two load tests that begin in the
    same second choose the same name. Raises LoadgenError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).touch(exist_ok=False)
    except FileExistsError as e:
        raise LoadgenError(why_not_new(out) or f"{out} is another run's: give another folder") from e
    except OSError as e:
        raise LoadgenError(f"cannot write the results to {out} ({e.strerror}): give another folder") from e


def provenance() -> dict[str, Any]:
    """What every result says about where it comes from: command, time, machine, versions, commit. Call it
    before what takes long: meanwhile others may commit."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command_line(), "started": started, **describe_host()}


def command_line() -> str:
    """The command that was typed, without keys and without paths of this machine."""
    if COMMAND_VARIABLE in os.environ:
        return os.environ[COMMAND_VARIABLE]
    words = map(_shown_word, without_secrets(sys.argv[1:], cut_short=False))
    return " ".join([_program(Path(sys.argv[0])), shlex.join(words)]).strip()


def _program(path: Path) -> str:
    """What a person types to start this program."""
    return path.parent.name if path.name == "__main__.py" else path.name


def _shown_word(word: str) -> str:
    option, separator, value = word.partition("=")
    if separator and value.startswith("/"):
        return f"{option}={shown_path(value)}"
    return shown_path(word) if word.startswith("/") else word


def shown_path(path: str | Path) -> str:
    """A path as results show it: relative to the working folder if it lies below, otherwise only its name.
    Paths of a machine concern nobody else."""
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def iter_records(folder: Path) -> Iterator[RequestRecord]:
    """The records of a run, one at a time. Raises LoadgenError when there are none."""
    path = folder / "requests.jsonl"
    try:
        with open(path, encoding="utf-8") as f:
            for record in read_records(f):
                _check_types(record)
                yield record
    except FileNotFoundError:
        raise LoadgenError(
            f"{folder} holds no requests.jsonl: it is not the results folder of a run"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise LoadgenError(
            f"{path} is damaged or not a file of records ({e}): remove those lines, or repeat the load test"
        ) from e


VERDICT = {"tpot_ms", "tpot_slo_ms", "ttft_ms", "ttft_slo_ms", "met"}
_NUMBERS = ("scheduled_s", "sent_s", "output_tokens", "prompt_tokens", "first_chunk_tokens", "turn")
_NUMBERS_OR_NONE = ("first_token_s", "last_token_s", "end_s", "slo_tpot_ms", "slo_ttft_ms", "accept_length")
_FLAGS = ("met_ttft", "met_tpot")
_TOO_MUCH = 1e12  # seconds, ms or tokens: no run has seen as much


def _check_types(record: RequestRecord) -> None:
    for key in _NUMBERS:
        _check(record, key, is_amount(getattr(record, key)))
    for key in _NUMBERS_OR_NONE:
        _check(record, key, getattr(record, key) is None or is_amount(getattr(record, key)))
    for key in _FLAGS:
        _check(record, key, isinstance(getattr(record, key), bool))
    _check(record, "slo_class", isinstance(record.slo_class, str) and record.slo_class.isprintable())
    _check(record, "error", isinstance(record.error, str | None))
    _check(record, "itl_ms", math.isfinite(sum(record.itl_ms)))
    told = record.server_slo
    _check(record, "server_slo", told is None or (isinstance(told, dict) and _is_verdict(told)))


def _check(record: RequestRecord, key: str, good: bool) -> None:
    if not good:
        raise TypeError(f"request {str(record.id)[:40]!r} has {key} {str(getattr(record, key))[:80]!r}")


def is_amount(value: Any) -> TypeGuard[float]:
    """Whether this can be seconds, ms or a number of tokens."""
    return isinstance(value, int | float) and 0 <= value < _TOO_MUCH


def _is_verdict(told: Mapping[str, Any]) -> bool:
    times = [v for k, v in told.items() if k != "met" and v is not None]
    return set(told) - {PREDICTED} == VERDICT and isinstance(told["met"], bool) and all(map(is_amount, times))


def write_summary(
    folder: Path, warmup_s: float, meta: Mapping[str, Any], reasons: list[str]
) -> dict[str, Any]:
    """Computes ``summary.json`` from ``requests.jsonl``; ``reasons``: why the run is invalid, besides
    what the records show."""
    summary = summarize(iter_records(folder), warmup_s, meta)
    recorded = summary["requests"] + summary["disconnected"] + summary["warmup_requests"]
    summary["unsent"] = max(0, int(meta.get("planned_requests") or recorded) - recorded)
    if summary["requests"] and summary["failed"] == summary["requests"]:
        reasons = [*reasons, f"all {summary['requests']} requests failed"]
    summary["invalid_reasons"] = list(dict.fromkeys([*summary["invalid_reasons"], *reasons]))
    summary["valid"] = not summary["invalid_reasons"]
    write_json(folder / "summary.json", summary)
    return summary

"""`adaserve bench kernels`: what its tables compare, and the files that it writes."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from adaserve.bench import kernels
from adaserve.bench.kernels import Case, KernelPlan, in_turns, kv_bytes, run_kernels
from adaserve.cli import app
from adaserve.engine.cpu import build
from adaserve.pair.folders import weights_folder
from adaserve.pair.shape import TARGET, shape_of
from adaserve.pair.widen import Width, widened_shape

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="no C compiler here")


def test_kernels_take_turns() -> None:
    played: list[str] = []
    taken = in_turns({name: partial(played.append, name[0]) for name in ("new", "old")}, 3)
    assert played == ["n", "o", "o", "n", "n", "o", "o", "n"]
    assert {name: len(seconds) for name, seconds in taken.items()} == {"new": 3, "old": 3}


def test_ratios_are_of_neighbors_and_above_one_where_the_new_kernels_are_faster() -> None:
    row = kernels._row(Case(1, 64), {"new": [1.0, 2.0, 8.0], "old": [2.0, 4.0, 8.0]})
    assert row.ratio == 2.0
    assert row.ms == {"new": 2000.0, "old": 4000.0}


def test_keys_and_values_of_a_token() -> None:
    assert kv_bytes(TARGET, 10) == 10 * 4 * 2 * (2 * 64 * 4)


def test_contexts_may_be_of_any_length() -> None:
    plan = KernelPlan((1,), ("fp32",), (1,), (65_600,), 1, 1, 1, (), None, None)
    run_kernels(plan, Console(quiet=True))


@pytest.mark.parametrize("command", ["kernels", "context"])
def test_contexts_beyond_memory_are_refused_before_anything_is_made(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "usable_memory", lambda: 2**20)
    monkeypatch.setattr(torch, "randn", None)
    ended = CliRunner().invoke(app, ["bench", command, "--contexts", "300"])
    assert ended.exit_code == 2 and "give shorter --contexts" in ended.output


def test_tables_are_written_for_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []
    monkeypatch.setattr(kernels, "provenance", lambda: {"timed_before": len(timed)})
    monkeypatch.setattr(kernels, "in_turns", lambda *args: timed.append(args) or in_turns(*args))
    plan = KernelPlan((1, 3), ("fp32", "fp16"), (1, 5), (16, 70), 2, 1, 1, (), build.SOURCES, tmp_path)
    run_kernels(plan, Console(quiet=True))
    (record,), (text,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    found = json.loads(record.read_text())
    assert record.stem == text.stem == found["set"]
    assert found["made"]["timed_before"] == 0 < len(timed), "time and commit are those of the start"
    target = shape_of(json.loads((weights_folder() / "target" / "config.json").read_text()))
    assert found["shapes"]["products"] == asdict(replace(widened_shape(target, Width()), layers=1))
    assert [row["case"]["tokens"] for row in found["products"]["fp16"]] == [1, 3]
    cases = [(row["case"]["context"], row["case"]["tokens"]) for row in found["attention"]]
    assert cases == [(16, 1), (16, 5), (70, 1), (70, 5)]
    rows = [line for line in text.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + 2 + 4  # heads and rules, products, attention


def test_tables_name_the_forward_that_others_are_compared_with() -> None:
    plan = KernelPlan((8, 16), ("fp32",), (16, 64), (16,), 1, 1, 1, (), None, None)
    console = Console(file=io.StringIO(), width=200)
    run_kernels(plan, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fp32 x 8 tokens" in said and "| x 16 tokens |" in said and "one token" not in said

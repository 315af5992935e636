"""The loop over cases, with its boundary replaced: no server, cases that take no time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adaserve.bench.sweep import runner
from adaserve.bench.sweep.plan import STOCK, Case, SweepError, SweepPlan
from adaserve.bench.sweep.prompts import ClassPrompt, PromptPool
from adaserve.bench.sweep.runner import Sweep
from adaserve.bench.sweep.store import Store
from adaserve.server import ServerSpec
from tests.bench.sweep.factories import HEAD, case_line, request

PLAN = SweepPlan(
    axes=("load",), policies=("none", "priced"), loads=(0.3, 0.6), seconds=5.0, check_plain=False
)
IDLE = {name: {"tpot_ms": [1.0, 2.0], "saturated_rps": [4.0, 3.0]} for name in ("none", STOCK)}


class FakeHost:
    """Counts what the loop asks of a server."""

    def __init__(self, *_: Any) -> None:
        self.served: list[str] = []
        self.stops = 0

    def __enter__(self) -> FakeHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.stops += 1

    def serve(self, policy: str, _warm_up: object = ()) -> str:
        self.served.append(policy)
        return "server"

    def stop(self) -> None:
        self.stops += 1


class World:
    """A folder that was prepared, and cases that do what they are told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store(folder)
        self.store.create()
        self.host = FakeHost()
        self.ran: list[str] = []
        self.fate: dict[str, list[BaseException]] = {}  # what happens to the next attempts of a case
        self.output = io.StringIO()
        self.now_s = 0.0
        head = {**HEAD, "commands": [], "plan": PLAN.to_json(), "server_settings": {}}
        self.store.write_head(head)
        PromptPool(tuple(ClassPrompt(c, c, 9) for c in ("coding", "chat", "summarization"))).save(
            self.store.prompts
        )
        monkeypatch.setattr(runner, "Host", lambda *_: self.host)
        monkeypatch.setattr(runner, "run_case", self.run_case)
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(runner.hosts, "idle_rounds", lambda *_: IDLE)

    def run_case(self, _server: str, case: Case, traffic: Any, *_: Path) -> dict[str, Any]:
        self.ran.append(case.id)
        self.now_s += traffic.seconds + 3.0
        if self.fate.get(case.id):
            raise self.fate[case.id].pop(0)
        return case_line(case, [request(0, 0.0, "coding", 9.0)])

    def sweep(self, plan: SweepPlan = PLAN, minutes: float | None = None) -> bool:
        console = Console(file=self.output, width=200)
        return Sweep(self.store, plan, ServerSpec(), console, {}, minutes=minutes).run()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "sweep", monkeypatch)


def test_every_case_runs_once_in_order_and_then_never_again(world: World) -> None:
    assert world.sweep()
    assert world.ran == [c.id for c in PLAN.cases()]
    assert "about" in world.output.getvalue() and "min left" in world.output.getvalue()
    assert world.sweep()
    assert len(world.ran) == 4
    assert world.sweep(SweepPlan.from_json({**PLAN.to_json(), "seeds": [0, 1]}))
    assert len(world.ran) == 8, "another seed runs, the first one does not"


def test_a_failure_is_written_down_the_server_started_anew_and_the_case_tried_again(world: World) -> None:
    second = PLAN.cases()[1].id
    world.fate[second] = [OSError("the server is gone")]
    assert world.sweep()
    assert world.ran == [*(c.id for c in PLAN.cases()), second]
    assert world.host.stops == 2, "after the failure and at the end"
    lines = (world.store.folder / "cases.jsonl").read_text()
    assert lines.count('"status": "failed"') == 1 and "the server is gone" in lines
    assert second in world.store.finished()


def test_a_case_that_never_works_is_left_out(world: World) -> None:
    second = PLAN.cases()[1].id
    world.fate[second] = [ValueError("no"), ValueError("still no")]
    assert not world.sweep()
    assert set(world.store.finished()) == {c.id for c in PLAN.cases()} - {second}


def test_three_failures_in_a_row_end_the_sweep_with_the_reason(world: World) -> None:
    for case in PLAN.cases():
        world.fate[case.id] = [OSError("no memory left")]
    with pytest.raises(SweepError, match="no memory left"):
        world.sweep()
    assert len(world.ran) == 3
    assert world.sweep(), "the same command goes on"


def test_ctrl_c_keeps_what_is_finished(world: World) -> None:
    third = PLAN.cases()[2].id
    world.fate[third] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        world.sweep()
    assert len(world.store.cases()) == 2 and world.host.stops == 1
    assert world.sweep()
    assert world.ran[3:] == [third, PLAN.cases()[3].id]


def test_a_sweep_that_was_stopped_while_it_prepared_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(FakeHost):
        def serve(self, policy: str, _warm_up: object = ()) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Host", Stopped)
    store = Store(tmp_path / "new")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Sweep(store, PLAN, ServerSpec(), Console(quiet=True), {}).run()
    assert SweepPlan.from_json(store.head()["plan"]) == PLAN


def test_no_case_is_begun_that_would_end_too_late(world: World) -> None:
    # A case takes 8 s, and 14 s are expected of the first: after two of them 5 s are left.
    assert not world.sweep(minutes=21 / 60)
    assert len(world.ran) == 2 and "time is up: 2 cases are left" in world.output.getvalue()
    assert world.sweep(minutes=10)
    assert len(world.ran) == 4


def test_time_is_kept_for_the_comparison_with_sglang(world: World) -> None:
    plan = SweepPlan.from_json({**PLAN.to_json(), "check_plain": True, "seeds": [0, 1]})
    assert not world.sweep(plan, minutes=322 / 60)
    ran = [c.rpartition(".s")[0].rpartition(".")[2] for c in world.ran]
    assert ran[-2:] == [STOCK, STOCK] and len(ran) == 4 + 2, "eight cases would have left no time for it"
    assert world.store.head()["idle_rounds"] == IDLE
    assert world.sweep(plan, minutes=10)

"""The loop over cases, with its boundary replaced: no server, cases that take no time."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from adaserve.bench.sweep import runner
from adaserve.bench.sweep.commands import server_of
from adaserve.bench.sweep.plan import Case, Point, SweepError, SweepPlan
from adaserve.bench.sweep.prompts import ClassPrompt, PromptPool
from adaserve.bench.sweep.report import write_all
from adaserve.bench.sweep.runner import Sweep
from adaserve.bench.sweep.store import Store, merged
from adaserve.bench.sweep.systems import STOCK, System
from adaserve.host.description import describe_host
from adaserve.server import ServerSpec
from adaserve.slo.validity import INTERRUPTED
from tests.bench.sweep.factories import HEAD, case_line, request

PLAN = SweepPlan(
    axes=("load",),
    policies=("none", "priced"),
    side_policies=("none", "priced"),
    loads=(0.3, 0.6),
    seconds=5.0,
    seeds=(0,),
    check_plain=False,
)
IDLE = {name: {"tpot_ms": [1.0, 2.0], "saturated_rps": [4.0, 3.0]} for name in ("none", STOCK)}


class FakeServers:
    """Counts what the loop asks of a server."""

    def __init__(self, *_: Any) -> None:
        self.served: list[str] = []
        self.stops = 0
        self.paces_ms: list[float] = []  # of single requests, before and after each attempt

    def __enter__(self) -> FakeServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stops += 1

    def serve(self, wanted: System, _warm_up: object = ()) -> SimpleNamespace:
        self.served.append(wanted.name)
        return SimpleNamespace(drain=lambda: None, report=lambda: {"latency": {"form": "x"}})

    def pace_ms(self, *_: object) -> float:
        return self.paces_ms.pop(0) if self.paces_ms else 10.0

    def stop(self) -> None:
        self.stops += 1


class World:
    """A folder that was prepared, and cases that do what they are told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store(folder)
        self.store.create()
        self.servers = FakeServers()
        self.ran: list[str] = []
        self.bar: list[float] = []  # blocks that it showed as finished, as each one began
        self.traffic: dict[str, Any] = {}
        self.others: dict[str, list[float]] = {}  # share of the host that others use in its attempts
        self.invalid: dict[str, list[list[str]]] = {}  # what was wrong with the load test of its attempts
        self.fate: dict[str, list[BaseException]] = {}  # what happens to the next attempts of a case
        self.output = io.StringIO()
        self.now_s = 0.0
        self.compared = 0
        server = {**HEAD["server"], "max_depth": ServerSpec().config.max_depth}
        mine = {"host": describe_host(), "plan": PLAN.to_json(), "server_settings": {}, "server": server}
        head = {**HEAD, "commands": [], **mine}
        self.store.write_head(head)
        PromptPool(tuple(ClassPrompt(c, c, 9) for c in ("coding", "chat", "summarization"))).save(
            self.store.prompts
        )
        monkeypatch.setattr(runner, "Servers", lambda *_: self.servers)
        monkeypatch.setattr(runner, "run_case", self.run_case)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(runner, "time", clock)  # there alone: threads of the progress bar sleep, too
        monkeypatch.setattr(runner.servers, "idle_rounds", self.idle_rounds)

    def idle_rounds(self, *_: object) -> dict[str, dict[str, list[float]]]:
        self.compared += 1
        return IDLE

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run_case(self, _: object, case: Case, traffic: Any, _work: Path) -> tuple[dict[str, Any], list[Any]]:
        self.traffic[case.id] = traffic
        self.ran.append(case.id)
        self.bar.append(self.playing.bar.tasks[0].completed)
        self.now_s += traffic.seconds + 3.0
        if self.fate.get(case.id):
            raise self.fate[case.id].pop(0)
        answers = [request(len(self.ran), 0.0, "coding", 9.0)]
        others = self.others.get(case.id, [0.01])
        return {
            **case_line(case, answers),
            "others": others.pop(0) if len(others) > 1 else others[0],
            "invalid_reasons": self.invalid[case.id].pop(0) if self.invalid.get(case.id) else [],
            "trace_sha256": traffic.sha256,
        }, answers

    def sweep(self, plan: SweepPlan = PLAN, **options: Any) -> bool:
        console = Console(file=self.output, width=200)
        self.playing = Sweep(self.store, plan, ServerSpec(), console, {}, **options)
        return self.playing.run()


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
    assert world.ran == [*(c.id for c in PLAN.cases()), second] and world.bar == [0, 1, 2, 3, 3]
    assert world.servers.stops == 2, "after the failure and at the end"
    lines = (world.store.folder / "cases.jsonl").read_text()
    assert lines.count('"status": "failed"') == 1 and "the server is gone" in lines
    assert second in world.store.finished()


def test_what_a_server_says_is_not_markup(world: World) -> None:
    world.fate["load0.30.none.s0.b0"] = [RuntimeError("HTTP 400: no [/foo] in [bar]")]
    world.sweep()
    assert "HTTP 400: no [/foo] in [bar]" in world.output.getvalue()
    line = {**case_line(Case(Point(0.3), "none", 0), [request(0, 0.0, "coding", 9.0)]), "error": "at [/x]"}
    assert "at [/x]" in Text.from_markup(runner._one_line(line, 60.0)).plain


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
    assert len(world.store.cases()) == 2 and world.servers.stops == 1
    assert world.sweep()
    assert world.ran[3:] == [third, PLAN.cases()[3].id]


def test_a_sweep_that_was_stopped_while_it_prepared_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(FakeServers):
        def serve(self, wanted: System, _warm_up: object = ()) -> SimpleNamespace:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Servers", Stopped)
    store = Store(tmp_path / "new")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Sweep(store, PLAN, ServerSpec(), Console(quiet=True), {}).run()
    assert SweepPlan.from_json(store.head()["plan"]) == PLAN


@pytest.mark.parametrize("key", ["cpu", "usable_cores"])
def test_a_sweep_does_not_go_on_on_another_host(world: World, key: str) -> None:
    world.store.write_head({**world.store.head(), "host": {**describe_host(), key: 0}})
    with pytest.raises(SweepError, match="another host"):
        world.sweep()


def test_a_sweep_does_not_go_on_with_deeper_trees(world: World) -> None:
    """All policies draft up to the depth of the longest chain: half of their blocks would not be like the
    other half."""
    assert world.sweep()
    plan = merged(PLAN, {"policies": ("chain-8",)})
    spec = server_of({"server": {}, "config": {}}, plan)
    with pytest.raises(SweepError, match=r"up to 5 levels.* up to 8: .* --out"):
        Sweep(world.store, plan, spec, Console(quiet=True), {}).run()
    assert SweepPlan.from_json(world.store.head()["plan"]) == PLAN, "so the sweep can still be continued"


def test_a_sweep_goes_on_with_the_same_requests_only(world: World, tmp_path: Path) -> None:
    """Its plan names files, which may have changed. Other systems would be compared by other SLOs."""
    classes = tmp_path / "classes.yaml"
    mine = "classes: {coding: {x_baseline: 1.2}, chat: {x_baseline: 2}, summarization: {x_baseline: 5}}"
    classes.write_text(mine)
    plan = replace(PLAN, slo_config=str(classes))
    assert world.sweep(plan) and world.sweep(plan)
    more, prompts = merged(plan, {"policies": ("turbospec",)}), world.store.prompts.read_text()
    for changed in (mine.replace("1.2", "1.5"), mine.replace("chat", "talk")):
        classes.write_text(changed)
        with pytest.raises(SweepError, match="--out"):
            world.sweep(more)
    classes.write_text(mine)
    world.store.prompts.unlink()  # it would be made again, with another baseline and capacity
    with pytest.raises(SweepError, match="the 4 blocks that are there"):
        world.sweep(more)
    world.store.prompts.write_text(prompts)
    assert len(world.ran) == 4 and world.sweep(more) and len(world.ran) == 6


def test_what_is_measured_before_the_blocks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts once; baseline, prefills and capacity in several rounds, so that one slow minute does not set
    the SLOs and loads of a whole sweep. The blocks are made with their medians."""
    world.store = Store(world.store.folder.parent / "new")
    pool = PromptPool(tuple(ClassPrompt(c, c, 9) for c in ("coding", "chat", "summarization")))
    asked: list[int] = []
    singles_ms, ttfts_ms = iter([1.0, 10.0, 19.0, 12.0]), iter([9.0, 80.0, 8.0])
    rates_rps = [5.0, 2.0, 4.0]
    rates = iter(rates_rps)
    fakes = {
        "unloaded": lambda _, texts: next(singles_ms),
        "prefill_times": lambda *_: ([2.0, 102.0], [t := next(ttfts_ms), t + 50.0]),
        "saturated_rps": lambda _, asks: asked.append(len(asks)) or next(rates),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(runner.servers, name, fake)
    monkeypatch.setattr(runner, "host_load", lambda: {"busy": 0.5, "load1": 1.0})
    monkeypatch.setattr(runner, "screened_pool", lambda *_: (pool, {"coding": 0.3}))
    assert world.sweep()
    head = world.store.head()
    assert (head["baseline_ms"], head["capacity_rps"], head["urgent"]) == (12.0, 4.0, "coding")
    assert head["set_up_rounds"] == {"baseline_ms": [10.0, 19.0, 12.0], "capacity_rps": rates_rps}
    assert head["prefill"] == {"fixed_ms": 8.0, "per_token_ms": 0.5}
    assert head["latency_model"] == {"form": "x"} and asked[0] > 0
    said = world.output.getvalue()
    assert "other programs use 50%" in said and "most outputs of coding repeat themselves" in said
    rows = world.traffic[PLAN.cases()[0].id].rows
    assert {round(r.slo_tpot_ms, 1) for r in rows if r.slo_class == "coding"} == {14.4}
    write_all(world.store, None, Console(quiet=True))
    page = (world.store.folder / "README.md").read_text()
    assert "Baseline 12.00 ms per token (10.00 to 19.00 while it was measured)" in page
    assert "4.00 requests/s (2.00 to 5.00 while it was measured)" in page


def test_a_client_that_reads_too_late_measures_no_baseline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets all tokens at once. Servers refuse SLOs that are multiples of that, in every block."""
    world.store = Store(world.store.folder.parent / "new")
    monkeypatch.setattr(runner.servers, "unloaded", lambda *_: 0.0168)
    monkeypatch.setattr(runner, "host_load", lambda: {"busy": 0.9, "load1": 8.0})
    with pytest.raises(SweepError, match=r"0\.017 ms: other programs .* --baseline-ms"):
        world.sweep()
    assert not world.ran


def test_a_sweep_keeps_its_baseline_and_capacity(world: World) -> None:
    head = world.store.head()
    same = {"baseline_ms": head["baseline_ms"], "capacity_rps": head["capacity_rps"]}
    assert world.sweep(**same)
    for name, value in same.items():
        with pytest.raises(SweepError, match="--out"):
            world.sweep(**{name: 2 * value})


def test_no_case_is_begun_that_would_end_too_late(world: World) -> None:
    # A case takes 8 s, and 14 s are expected of the first: after two of them 5 s are left.
    assert not world.sweep(minutes=21 / 60)
    assert len(world.ran) == 2 and "time is up: 2 blocks are left" in world.output.getvalue()
    assert world.sweep(minutes=10)
    assert len(world.ran) == 4


def test_idle_servers_are_compared_once_and_before_the_blocks(world: World) -> None:
    plan = replace(PLAN, check_plain=True)
    world.fate[plan.cases()[0].id] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        world.sweep(plan)
    assert world.store.head()["idle_rounds"] == IDLE
    assert world.sweep(plan) and world.compared == 1
    assert sum(f".{STOCK}." in name for name in set(world.ran)) == 2


def test_a_block_on_a_busy_host_is_measured_again_and_the_quietest_attempt_counts(world: World) -> None:
    first, second = (c.id for c in PLAN.cases()[:2])
    world.others = {first: [0.5, 0.02], second: [0.4, 0.3, 0.6]}
    assert world.sweep()
    assert world.ran[:5] == [first, first, second, second, second], "three attempts, then the next block"
    lines = world.store.finished()
    assert (lines[first]["others"], lines[first]["attempts"]) == (0.02, 2)
    assert (lines[second]["others"], lines[second]["attempts"]) == (0.3, 3)
    assert [r.id for r in world.store.records(first)] == ["2"], "the records of the attempt that counts"
    assert [r.id for r in world.store.records(second)] == ["4"]


def test_a_block_whose_load_test_was_not_valid_is_measured_again(world: World) -> None:
    first, second, third = (c.id for c in PLAN.cases()[:3])
    late = ["answers were read late"]
    world.invalid = {first: [late, []], second: [late, late, late], third: [[INTERRUPTED]]}
    world.others = {first: [0.01, 0.14], second: [0.03, 0.02, 0.5]}
    assert world.sweep()
    assert world.ran[:6] == [first, first, second, second, second, third], "the server's doing is a result"
    lines = world.store.finished()
    assert (lines[first]["others"], lines[first]["invalid_reasons"]) == (0.14, []), "the valid attempt counts"
    assert (lines[second]["others"], lines[second]["invalid_reasons"]) == (0.02, late)
    assert "answers were read late" in world.output.getvalue()
    lost = request(1, 0.0, "coding", 9.0)
    lost.error = "HTTP 503"
    assert not runner.client_faults({"invalid_reasons": ["all 1 requests failed"]}, [lost])


def test_a_block_on_a_slow_host_is_measured_again(world: World) -> None:
    first, second = (c.id for c in PLAN.cases()[:2])
    world.servers.paces_ms = [10.0, 13.0, 10.0, 11.0, 10.1, 10.2]
    assert world.sweep()
    assert world.ran[:3] == [first, first, second], "11 ms is within what is usual"
    line = world.store.finished()[first]
    assert (line["pace_ms"], line["attempts"]) == ([10.0, 11.0], 2)
    assert "30% slower than usual" in world.output.getvalue()


def test_a_block_waits_until_the_host_is_as_usual(world: World) -> None:
    first, second = (c.id for c in PLAN.cases()[:2])
    world.servers.paces_ms = [13.0, 13.0, 10.0, 10.1]
    assert world.sweep()
    assert world.ran[:2] == [first, second], "it was played once"
    line = world.store.finished()[first]
    assert (line["pace_ms"], line["attempts"]) == ([10.0, 10.1], 1)


def test_a_block_does_not_wait_for_ever_and_ever_less_on_a_host_that_stays_slow(world: World) -> None:
    world.servers.pace_ms = lambda *_: 10.0 if world.ran else 13.0  # type: ignore[method-assign]
    assert world.sweep()
    waited_s = world.now_s - len(world.ran) * (PLAN.seconds + 3.0)
    assert waited_s == pytest.approx(runner.PATIENCE_S, abs=runner.PAUSE_S)
    world.servers.pace_ms = lambda *_: 13.0  # type: ignore[method-assign]
    played, start_s = len(world.ran), world.now_s
    assert world.sweep(replace(PLAN, seeds=(0, 1)))
    waited_s = world.now_s - start_s - (len(world.ran) - played) * (PLAN.seconds + 3.0)
    assert len(world.ran) - played > 4
    assert runner.PATIENCE_S < waited_s < 2 * runner.PATIENCE_S + 12 * runner.PAUSE_S


def test_lengths_are_tried_first_and_the_best_one_plays(world: World) -> None:
    plan = SweepPlan.from_json(
        {**PLAN.to_json(), "policies": ["chain", "priced"], "side_policies": ["priced"]}
    )
    assert world.sweep(plan)
    tuned = len(plan.tuning_cases())
    assert world.ran == [c.id for c in (*plan.tuning_cases(), *plan.cases())] and tuned == 4
    settings = {c["policy"]: c["setting"] for c in world.store.finished().values() if c["seed"] == 0}
    assert settings == {"chain": "chain-2", "priced": "priced"}, "of equal ones the shorter"
    assert set(world.servers.served[:tuned]) == {"chain-2", "chain-4"}


def test_blocks_have_their_part_of_the_seeds_requests_with_both_slos(world: World) -> None:
    plan = SweepPlan.from_json({**PLAN.to_json(), "blocks": 2, "loads": [2.0], "at": 2.0})
    assert world.sweep(plan)
    parts = [world.traffic[f"load2.00.priced.s0.b{k}"].rows for k in (0, 1)]
    assert parts[0] != parts[1] and all(0 <= r.arrival_s < 5.0 for rows in parts for r in rows)
    assert sum(map(len, parts)) == pytest.approx(2.0 * HEAD["capacity_rps"] * 10.0, abs=3)
    for row in (*parts[0], *parts[1]):
        prefill_ms = 10.0 + 1.0 * row.prompt_tokens
        loose = row.slo_class == "summarization"
        assert row.slo_ttft_ms == pytest.approx(10 * prefill_ms + 2000 if loose else 5 * prefill_ms + 250)
    assert {r.slo_class: r.slo_tpot_ms for r in parts[0]}["coding"] == pytest.approx(12.0)
    assert world.traffic["load2.00.none.s0.b1"].rows == parts[1], "the same for all systems"


def test_only_the_scheduling_by_priority_gets_priorities(world: World) -> None:
    names = ["sglang", "sglang-priority"]
    plan = SweepPlan.from_json({**PLAN.to_json(), "policies": names, "side_policies": names, "loads": [0.6]})
    assert world.sweep(plan)
    assert world.traffic["load0.60.sglang.s0.b0"].priorities is None
    ranks = world.traffic["load0.60.sglang-priority.s0.b0"].priorities
    assert ranks == {"summarization": 0, "chat": 1, "coding": 2}

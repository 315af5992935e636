"""Which cases a sweep has, in which order, and how it is continued."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adaserve.bench.sweep import commands
from adaserve.bench.sweep.commands import Options, plan_of, server_of, server_settings, trace_files
from adaserve.bench.sweep.plan import (
    TUNING_SEED,
    Case,
    Point,
    SweepError,
    SweepPlan,
)
from adaserve.bench.sweep.store import SCHEMA_VERSION, Store, merged
from adaserve.bench.sweep.systems import (
    AS_IT_IS,
    GATED,
    STOCK,
    default_policy,
    family,
    is_rival,
    system,
    with_length,
)
from adaserve.bench.sweep.tuning import setting_of
from adaserve.cli import app
from adaserve.config import PREFILLS, ConfigError
from adaserve.server import ServerSpec


@pytest.mark.parametrize(
    "point",
    [
        Point(0.45),
        Point(1.0, urgent=0.3),
        Point(0.6, scale=0.8),
        Point(0.6, 0.9, 1.4, True),
        Point(0.15, peaks=True),
        Point(0.6, kind="sessions"),
        Point(0.6, kind="azure-code.2023"),
        Point(0.601, urgent=1 / 3, scale=1.2345678),
        Point(1e-5, kind="a=b"),
    ],
)
def test_a_points_name_says_all_of_it(point: Point) -> None:
    assert Point.parse(point.id) == point


def test_points_that_differ_have_names_that_differ() -> None:
    assert Point(0.6).id == "load0.60" != Point(0.601).id
    plan = plan_of(Options({"loads": (0.6, 0.6, 0.601), "seeds": (1, 1)}), Store(Path("none")))
    assert plan.loads == (0.6, 0.601) and plan.seeds == (1,)


def test_axes_share_the_point_that_they_have_in_common() -> None:
    plan = SweepPlan(axes=("load", "share", "scale"))
    base = Point(plan.at)
    for axis, x in (("load", plan.at), ("share", 0.6), ("scale", 1.2)):
        assert dict(plan.points(axis))[x] == base
    cases = plan.cases()
    assert len(cases) == len(set(cases)) == len({c.id for c in cases})


def test_a_file_of_classes_decides_the_urgent_slo_so_no_value_is_taken_for_it() -> None:
    plan = SweepPlan(slo_config="classes.yaml")
    assert dict(plan.points("scale"))[1.2].scale == 1.2
    assert dict(plan.points("share"))[0.6].urgent == 0.6


def test_all_systems_play_a_block_in_an_order_of_its_own_before_any_plays_the_next() -> None:
    plan = SweepPlan(axes=("load",), seeds=(0, 1), blocks=2)
    groups: list[tuple[Point, int, int]] = []
    orders = []
    for case in plan.cases():
        key = (case.point, case.seed, case.block)
        if not groups or groups[-1] != key:
            groups.append(key)
            orders.append([])
        orders[-1].append(case.policy)
    assert len(groups) == len(set(groups)) == 2 * 2 * len(plan.loads), "a block was left and taken up again"
    assert all(sorted(o) == sorted(plan.policies) for o in orders)
    assert len({tuple(o) for o in orders}) > 1
    assert [seed for _, seed, _ in groups] == [0] * 2 * len(plan.loads) + [1] * 2 * len(plan.loads)
    assert [block for _, _, block in groups[:4]] == [0, 1, 0, 1]
    assert groups[0][0].load == max(plan.loads), "the point that is judged comes first"


def test_rivals_are_the_others_as_they_are_or_with_our_gate() -> None:
    assert [n for n in AS_IT_IS if is_rival(n, gated=False)] == [
        n for n in AS_IT_IS if n not in (default_policy(), "adaserve")
    ]
    assert [n for n in GATED if is_rival(n, gated=True)] == [n for n in GATED if n != "adaserve+gate"]
    assert not any(is_rival(n, gated=True) for n in AS_IT_IS)


def test_only_the_default_policy_has_the_gate_by_itself() -> None:
    assert system(default_policy()).prefill == "mixed"
    for name in ("turbospec", "adaserve", "urgency-2", "chain-4"):
        assert system(name).prefill == "exclusive" and system(f"{name}+gate").prefill == "mixed"
        assert system(f"{name}+gate").policy == name == system(name).policy
    modes = [system(f"{name}+{mode}") for name in (default_policy(), "chain-4") for mode in PREFILLS]
    assert [s.prefill for s in modes] == [*PREFILLS, *PREFILLS]
    assert {s.policy for s in modes} == {default_policy(), "chain-4"}
    with pytest.raises(ConfigError, match="'priced\\+fast' ends in none of \\+gate, \\+mixed, \\+slack"):
        system("priced+fast")
    assert family("chain+slack") == "chain" and with_length("chain+slack", 2) == "chain-2+slack"
    assert not is_rival(f"{default_policy()}+slack", gated=True), "one of ours"
    assert system("sglang").policy is None and system("sglang-priority").priority
    assert family("chain+gate") == "chain" and family("chain-4") is None is family("turbospec")


def test_lengths_are_chosen_on_a_seed_that_is_not_reported() -> None:
    plan = SweepPlan(policies=("chain", "chain+gate", "priced", "urgency"), side_policies=("priced",))
    tuned = plan.tuning_cases()
    assert {c.seed for c in tuned} == {TUNING_SEED} and not {c.id for c in tuned} & {
        c.id for c in plan.cases()
    }
    named = (("chain", ""), ("chain", "+gate"), ("urgency", ""))
    for load in plan.loads:
        here = {c.policy for c in tuned if c.point == Point(load)}
        assert here == {f"{name}-{k}{gate}" for k in (2, 4) for name, gate in named}
    with pytest.raises(SweepError, match="take another"):
        SweepPlan(seeds=(TUNING_SEED,))


def test_lengths_are_tried_where_they_will_be_played_and_nowhere_else() -> None:
    plan = SweepPlan(axes=("kinds",), policies=("chain+gate", "priced"), side_policies=("urgency", "priced"))

    def tried(plan: SweepPlan) -> list[tuple[float, str]]:
        return sorted((c.point.load, c.policy) for c in plan.tuning_cases())

    beside = [(plan.at, "urgency-2"), (plan.at, "urgency-4")]
    assert tried(plan) == beside
    here = [(load, f"chain-{k}+gate") for load in (0.3, 1.0) for k in (2, 4)]
    assert tried(replace(plan, axes=("load", "kinds"), loads=(0.3, 1.0))) == sorted(here + beside)


def line(
    policy: str, load: float, attained: float, goodput: float = 1.0, seed: int = TUNING_SEED
) -> dict[str, Any]:
    total = {"slo_attainment": attained, "token_goodput": goodput}
    return {"policy": policy, "point": Point(load).id, "seed": seed, "all": total}


def test_a_family_gets_the_length_that_attained_most_at_the_nearest_load() -> None:
    lines = {
        str(k): each
        for k, each in enumerate(
            [
                line("chain-2", 0.3, 0.8), line("chain-4", 0.3, 0.9), line("chain-4", 1.0, 0.2),
                line("chain-2", 1.0, 0.5), line("chain-2", 0.3, 1.0, seed=0),
                line("urgency-2", 0.3, 0.5, 2.0), line("urgency-4", 0.3, 0.5, 3.0),
                line("chain-2+gate", 0.3, 0.6), line("chain-4+gate", 0.3, 0.7),
                line("chain-2+gate", 1.0, 0.4), line("chain-4+gate", 1.0, 0.5),
            ]
        )
    }  # fmt: skip

    def played(policy: str, load: float) -> str:
        return setting_of(Case(Point(load), policy, 0), lines, (2, 4))

    assert played("chain", 0.3) == "chain-4" and played("chain+gate", 0.4) == "chain-4+gate"
    assert played("chain", 0.9) == "chain-2", "and the reported seeds have no say"
    assert played("chain+gate", 0.9) == "chain-4+gate", "behind a gate fewer requests run"
    assert played("urgency", 1.0) == "urgency-4", "of equal ones the one with more goodput"
    assert played("turbospec+gate", 1.0) == "turbospec+gate" and played("chain-6", 0.3) == "chain-6"
    with pytest.raises(SweepError, match="adaptive-verify"):
        played("adaptive-verify", 0.3)


def test_the_plan_is_printed_for_people_and_programs() -> None:
    done = CliRunner().invoke(app, ["bench", "sweep", "--plan-only", "--quick"])
    *blocks, summary = done.stdout.splitlines()
    plan = plan_of(Options({}, quick=True), Store(Path("none")))
    assert blocks == [case.id for case in plan.blocks_in_order()] and len(blocks) == 2
    assert summary.startswith("2 blocks, about ")


def test_defaults_take_about_an_hour() -> None:
    from adaserve.bench.sweep.commands import minutes_of

    assert 40 < minutes_of(SweepPlan()) < 85


def test_plain_sglang_is_compared_at_the_ends_of_the_load_axis() -> None:
    plan = SweepPlan(policies=("none", "priced"), loads=(0.2, 0.4, 0.6), blocks=2)
    cases = plan.cases()
    stock = [k for k, case in enumerate(cases) if case.policy == STOCK]
    assert [(cases[k].point.load, cases[k].seed, cases[k].block) for k in stock] == [(0.6, 0, 0), (0.2, 0, 0)]
    for k in stock:
        beside = Case(cases[k].point, "none", 0)
        assert abs(cases.index(beside) - k) <= 2, "in turns, and not an hour later"
    assert not any(c.policy == STOCK for c in replace(plan, check_plain=False).cases())
    assert replace(plan, policies=("none", STOCK)).cases().count(Case(Point(0.2), STOCK, 0)) == 1


def test_every_trace_of_a_folder_is_a_point(tmp_path: Path) -> None:
    for name in ("azure.csv.gz", "artifact.jsonl", "README.md", ".gitignore"):
        (tmp_path / name).write_text("")
    plan = plan_of(Options({"traces": trace_files(tmp_path)}), Store(tmp_path / "new"))
    points = [p for _, p in plan.points("traces")]
    assert [p.kind for p in points] == ["artifact", "azure"] and plan.axes == ("load", "traces")
    assert plan.trace_of(points[1]) == str(tmp_path / "azure.csv.gz")
    assert plan.trace_of(Point(0.6)) is None is plan.trace_of(Point(0.6, kind="long"))
    begun = Store(tmp_path / "begun")
    begun.create()
    begun.write_head({"schema_version": SCHEMA_VERSION, "plan": SweepPlan(axes=("peaks",)).to_json()})
    assert plan_of(Options({"traces": plan.traces}), begun).axes == ("peaks", "traces")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SweepError, match="holds no traces"):
        trace_files(tmp_path / "empty")


def test_traces_keep_names_of_their_own() -> None:
    plan = SweepPlan(axes=("traces",), traces=("a/prop0.3.jsonl", "a/prop0.7.jsonl.gz", "a/0-15s.csv"))
    assert [p.kind for _, p in plan.points("traces")] == ["prop0.3", "prop0.7", "0-15s"]
    for wrong in (("a/x.csv", "b/x.jsonl"), ("a/long.jsonl",)):
        with pytest.raises(SweepError, match="rename"):
            SweepPlan(traces=wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("axes", ("load", "depth")),
        ("axes", ()),
        ("policies", ()),
        ("loads", (0.0,)),
        ("shares", (1.2,)),
        ("seconds", 0.0),
        ("at", 0.0),
        ("blocks", 0),
        ("kinds", ("dreams",)),
        ("axes", ("traces",)),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(SweepError):
        SweepPlan(**{field: value})  # type: ignore[arg-type]


def test_a_plan_comes_back_from_its_file() -> None:
    plan = SweepPlan(axes=("load", "peaks"), seeds=(3, 4), trace="a.jsonl", temperature=0.0)
    assert SweepPlan.from_json(plan.to_json()) == plan
    older = {k: v for k, v in plan.to_json().items() if k != "max_tokens"}
    assert SweepPlan.from_json(older).stated_max_tokens is None, "they stated how long each answer is"


def test_a_sweep_may_grow_but_its_traffic_may_not_change() -> None:
    old = SweepPlan(loads=(0.3, 0.6), seeds=(0,), policies=("none", "priced"), check_plain=False)
    new = merged(old, {"loads": (0.6, 0.9), "seeds": (1,), "policies": ("chain-4",)})
    assert new.loads == (0.3, 0.6, 0.9) and new.seeds == (0, 1)
    assert new.policies == ("none", "priced", "chain-4")
    assert set(old.cases()) <= set(new.cases())
    assert merged(old, {"seconds": old.seconds}) == old
    for given in ({"seconds": 5.0}, {"trace": "x.jsonl"}, {"at": 0.9}, {"lengths": (2, 4, 8)}):
        with pytest.raises(SweepError, match="--out"):
            merged(old, given)


def test_flags_beat_quick_and_policies_hold_on_every_axis(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    plan = plan_of(Options({"policies": ("none", "chain-2"), "seconds": 4.0}, quick=True), store)
    assert plan.side_policies == ("none", "chain-2") and plan.seconds == 4.0 and plan.seeds == (0,)
    assert plan_of(Options({"loads": (0.2, 0.5, 0.8)}), store).at == 0.5


def test_every_field_of_a_plan_has_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(commands, "show_plan", seen.append)
    CliRunner().invoke(app, ["bench", "sweep", "--plan-only", "--loads", "0.5,.50"])
    assert list(seen[0].given) == [f.name for f in fields(SweepPlan)]
    assert {k: v for k, v in seen[0].given.items() if v is not None} == {"loads": (0.5,)}


def test_the_server_drafts_as_deep_as_the_longest_chain() -> None:
    plan = SweepPlan(policies=("none", "chain-7+gate"), side_policies=("none",))
    settings = {"server": {}, "config": {"max_depth": 3}}
    assert server_of(settings, plan).config.max_depth == 7
    tuned = SweepPlan(policies=("urgency",), side_policies=("none",), lengths=(2, 6))
    assert server_of(settings, tuned).config.max_depth == 6
    with pytest.raises(ValueError, match="unknown policy"):
        server_of(settings, SweepPlan(policies=("none", "chian-4")))


def test_stock_sglang_is_the_same_server_less_speculation() -> None:
    spec = ServerSpec(model="target", draft="draft", port=1234, extra=("--max-running-requests", "8"))
    ours = spec.command()
    stock = replace(spec, algorithm=None).command()
    gone = ["--speculative-draft-model-path", "draft", "--speculative-algorithm", "ADASERVE"]
    assert sorted([*stock, *gone]) == sorted(ours) and "ADASERVE" not in stock


def test_a_sweep_goes_on_with_the_server_that_it_was_begun_with(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    begun = server_settings(Options({}, server={"size": "12M", "model": None}, config={"budget": 9}), store)
    store.create()
    head = {"schema_version": SCHEMA_VERSION, "plan": SweepPlan().to_json()}
    store.write_head({**head, "server_settings": begun})
    again = server_settings(Options({}, server={"size": None, "model": None}, config={"budget": None}), store)
    assert again == {"server": {"size": "12M"}, "config": {"budget": 9}}
    assert again == server_settings(Options({}, server={"size": "12M"}, config={"budget": 9}), store)
    for other in ({"size": "100M"}, {"model": "/m"}):
        with pytest.raises(SweepError, match="--out"):
            server_settings(Options({}, server=other), store)


def test_finished_cases_are_not_run_again_and_failed_ones_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    store.create()
    cases = [Case(Point(0.3), "none", seed) for seed in range(4)]
    for case, status in zip(cases, ("ok", "failed", "timeout", "failed"), strict=True):
        store.add({"id": case.id, "status": status})
    store.add({"id": cases[3].id, "status": "ok"})  # a second attempt
    assert set(store.finished()) == {cases[0].id, cases[2].id, cases[3].id}


def test_a_line_that_was_cut_off_costs_its_own_case_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    store.create()
    store.add({"id": "a", "status": "ok"})
    with open(store.folder / "cases.jsonl", "a") as f:
        f.write('{"id": "b", "sta')
    store.add({"id": "c", "status": "ok"})
    assert set(store.cases()) == {"a", "c"}


@pytest.mark.parametrize("more", [(), ("--plan-only",)])
def test_a_folder_with_something_else_is_left_alone(more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    done = CliRunner().invoke(app, ["bench", "sweep", "--out", str(tmp_path), *more])
    assert done.exit_code == 2 and "another folder" in done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["precious.txt"]

"""From records to figures: aggregation, comparisons, verdicts, tables, pictures."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from adaserve.bench.jsonl import write_records
from adaserve.bench.sweep import figures, results_table
from adaserve.bench.sweep.aggregate import Block, Comparison, Outcome, Results, compare, together
from adaserve.bench.sweep.commands import Options, plan_of
from adaserve.bench.sweep.intervals import Interval
from adaserve.bench.sweep.measure import server_figures, settled
from adaserve.bench.sweep.plan import Case, Point, SweepError, SweepPlan
from adaserve.bench.sweep.report import summary, write_all
from adaserve.bench.sweep.results_table import BEGIN, END, fill_readme, simulated
from adaserve.bench.sweep.store import Store
from adaserve.slo.run_summary import RequestRecord
from adaserve.slo.trace import TraceRow
from tests.bench.sweep.factories import case_line, finished_sweep, request

PLAN = SweepPlan(
    policies=("none", "chain-4", "adaserve", "priced"), side_policies=("none", "priced"), loads=(0.3, 0.6),
    at=0.6, seeds=(0, 1), blocks=2, seconds=20.0, axes=("load", "share", "scale", "peaks"),
)  # fmt: skip


def tpot_ms(case: Case, i: int) -> float:
    """priced misses every tenth request, adaserve every fifth, chain-4 half, the others all urgent ones."""
    every = {"priced": 10, "adaserve": 5, "chain-4": 2}.get(case.policy, 1)
    return 13.0 if i % every == 0 else 9.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished_sweep(tmp_path_factory.mktemp("sweeps") / "sweep", PLAN, tpot_ms)


def test_attainment_and_goodput_are_those_of_the_records(store: Store) -> None:
    outcome = Results(store).get(Point(0.6), "chain-4")
    assert outcome is not None
    ids = [f"load0.60.chain-4.s{seed}.b{block}" for seed in (0, 1) for block in (0, 1)]
    records = [r for name in ids for r in store.records(name)]
    met = [r for r in records if r.attained]
    assert outcome.attainment().value == pytest.approx(len(met) / len(records))
    duration_s = sum(c["duration_s"] for c in outcome.cases)
    assert outcome.goodput().value == pytest.approx(sum(r.output_tokens for r in met) / duration_s)


def test_an_axis_is_what_was_measured_of_it_in_ascending_order(tmp_path: Path) -> None:
    """An axis that is not in the plan has nothing, though others may share a point with it."""
    plan = replace(PLAN, axes=("load",), loads=(0.6, 0.3, 1.0), seeds=(0,), blocks=1)
    results = Results(finished_sweep(tmp_path / "s", plan, tpot_ms))
    assert [x for x, _ in results.on("load")] == [0.3, 0.6, 1.0]
    assert results.on("share") == [] == results.policies("share")


def test_percentiles_are_of_all_requests_of_a_class_and_counters_of_all_iterations(tmp_path: Path) -> None:
    """And not means of what blocks say: one slow block of four holds all of the slowest requests."""
    slow = Case(Point(0.6), "priced", 1, 1)
    store = finished_sweep(tmp_path / "s", PLAN, lambda c, i: (30.0 if c == slow else 9.0) + 0.01 * i)
    line = store.finished()[slow.id]
    busy = {**line["server"], "iterations": 900, "running": 9.0, "depth": 4.0, "tree_nodes": 0.0}
    store.add({**line, "server": busy})
    outcome = Results(store).get(Point(0.6), "priced")
    assert outcome is not None
    ids = [f"load0.60.priced.s{seed}.b{block}" for seed in (0, 1) for block in (0, 1)]
    mine = [[1e3 * (r.tpot_s or 0.0) for r in store.records(n) if r.slo_class == "coding"] for n in ids]
    latest = outcome.by_class["coding"]["p99_tpot_ms"]
    assert latest == pytest.approx(np.percentile(np.concatenate(mine), 99))
    assert latest > 2 * np.mean([np.percentile(m, 99) for m in mine])
    assert outcome.served("depth") == pytest.approx((3 * 300 * 2.0 + 900 * 4.0) / 1800)
    assert outcome.served("tree_nodes") == pytest.approx(900 * 3.0 * 2.5 / (900 * 3.0 + 900 * 9.0))
    (row,) = [r for r in write_page(store).read_text().splitlines() if r.startswith("| **priced** | 14")]
    assert " 30.6 |" in row


def test_a_policy_is_compared_with_the_best_baseline_and_not_with_its_like(store: Store) -> None:
    results = Results(store)
    c = results.against_best(Point(0.6), "priced")
    assert c is not None and c.rival == "chain-4", "adaserve is better, but compared apart"
    mine, theirs = (results.get(Point(0.6), n) for n in ("priced", "chain-4"))
    assert mine is not None and theirs is not None
    a, b = mine.attainment().value, theirs.attainment().value
    assert c.points.value == pytest.approx(100 * (a - b)) and c.points.low > 0
    assert c.violations.value == pytest.approx((1 - b) / (1 - a))
    assert c.goodput.value == pytest.approx(mine.goodput().value / theirs.goodput().value)
    assert c.verdict == "better"
    published = results.against(Point(0.6), "priced", "adaserve")
    assert published is not None and published.violations.value > 1


def test_equal_outcomes_leave_room_for_chance(tmp_path: Path) -> None:
    """All requests of all systems ended alike, which some hundreds of requests may do by chance."""
    same = finished_sweep(tmp_path / "same", PLAN, lambda _, i: 13.0 if i % 3 else 9.0)
    c = Results(same).against_best(Point(0.3), "priced")
    assert c is not None and c.verdict == "unclear" and c.points.value == 0
    assert -10 < c.points.low < -1 and 1 < c.points.high < 10
    assert c.violations.value == c.goodput.value == 1.0 and c.violations.low < 1 < c.violations.high


def test_no_violation_left_is_said_and_not_divided_by(tmp_path: Path) -> None:
    perfect = finished_sweep(
        tmp_path / "p", PLAN, lambda c, i: 9.0 if c.policy == "priced" else tpot_ms(c, i)
    )
    results = Results(perfect)
    c = results.against_best(Point(0.3), "priced")
    assert c is not None and math.isinf(c.violations.value)
    rows = json.loads(json.dumps(summary(results), allow_nan=False))["rows"]
    (told,) = (r for r in rows if (r["point"], r["policy"]) == ("load0.30", "priced"))
    assert told["attainment"][0] == 1.0
    assert told["against_best_baseline"]["violations_ratio"] == [None, None, None]


@pytest.mark.parametrize(
    ("points", "verdict"),
    [((4, 1, 7), "better"), ((1, 0.5, 2), "better"), ((4, -1, 9), "unclear"), ((-3, -6, 0), "unclear"),
     ((-3, -5, -2), "below"), ((4, math.nan, math.nan), "unclear")],
)  # fmt: skip
def test_the_verdict_is_where_the_whole_interval_lies(
    points: tuple[float, float, float], verdict: str
) -> None:
    one = Interval(1, 1, 1)
    assert Comparison("a", "b", Interval(*points), one, one).verdict == verdict


def test_bars_come_from_blocks_and_from_requests(tmp_path: Path) -> None:
    """Blocks that are alike leave the chance of requests; one that a system lost altogether leaves much."""
    alike = finished_sweep(tmp_path / "a", PLAN, lambda _, i: 13.0 if i % 3 else 9.0)
    bars = Results(alike).get(Point(0.6), "chain-4")
    assert bars is not None
    assert 0.03 < bars.attainment().value - bars.attainment().low < 0.1
    odd = finished_sweep(tmp_path / "b", PLAN, lambda c, _: 99.0 if (c.seed, c.block) == (1, 1) else 9.0)
    bars = Results(odd).get(Point(0.6), "chain-4")
    assert bars is not None and bars.attainment().value == 0.75
    assert bars.attainment().low <= 0.5 and 0.95 < bars.attainment().high <= 1.0


def played(attained: Sequence[int], of: int = 100) -> Outcome:
    """An outcome with blocks in which that many of the requests attained."""
    blocks = {(0, k): Block(of, n, 100.0 * n, n, n, duration_s=20.0) for k, n in enumerate(attained)}
    return Outcome(Point(1.0), "some", (), blocks)


def compared(*attained: Sequence[int], of: int = 100) -> Comparison:
    """The first system with the best of the others."""
    mine, *others = together([played(met, of) for met in attained])
    found = compare(mine, others)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shares", "blocks"),
    [((60, 45), 2), ((60, 45), 3), ((60, 45), 6), ((60, 45, *range(30, 41)), 3), ((80, 34, 60, 50), 2),
     ((80, 34, 60, 50), 6)],
)  # fmt: skip
def test_an_interval_holds_the_truth_nine_times_of_ten(shares: tuple[int, ...], blocks: int) -> None:
    """However few blocks there are: a bootstrap over two of them holds it half of the time. What disturbs all
    systems cancels in a difference, but not in the ratio of a high share to a low one."""
    rng, held, (a, b, *_) = np.random.default_rng(blocks), np.zeros(4), shares
    for _ in range(500):
        host = rng.normal(0, 5, blocks)  # disturbs all
        met = [100 * (rng.normal(p, 3, blocks) + host).round(2) for p in shares]
        mine, theirs, *_ = together([played(m.astype(int).tolist(), 10_000) for m in met])
        c = compare(mine, [theirs])
        assert c is not None
        violations, goodput = (100 - b) / (100 - a), a / b
        found = (
            (c.points, a - b),
            (c.violations, violations),
            (c.goodput, goodput),
            (mine.attainment(), a / 100),
        )
        held += [v.low <= truth <= v.high for v, truth in found]
    assert (held > 425).all() and held[0] < 480, held


def test_blocks_that_agree_by_chance_prove_nothing() -> None:
    """65 of 150 requests more in each of three blocks, as it once happened."""
    c = compared([85, 79, 90], [20, 14, 25], of=150)
    assert c.points.value == pytest.approx(130 / 3) and c.verdict == "better"
    assert 5 < c.points.value - c.points.low < 12 and 5 < c.points.high - c.points.value < 12


def test_no_interval_leaves_what_is_possible() -> None:
    c = compared([100, 100, 99], [2, 0, 12])
    assert 50 < c.points.low < c.points.value < c.points.high < 100
    whole = together([played([100, 100, 100]), played([80, 99, 60])])[0].attainment()
    assert 0.5 < whole.low < 1.0 == whole.value == whole.high


def test_one_block_gives_no_interval_and_no_verdict(tmp_path: Path) -> None:
    plan = replace(PLAN, seeds=(0,), blocks=1, axes=("load",))
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    c = Results(store).against_best(Point(0.6), "priced")
    assert c is not None and c.points.value > 10 and c.verdict == "unclear"
    assert all(math.isnan(v) for v in (c.points.low, c.violations.high, c.goodput.low))
    page = write_page(store).read_text()
    assert "Of 2 points: 0 better, 2 unclear, 0 below." in page
    assert "nan" not in page and "[-" not in page


def test_a_ratio_of_what_happened_in_one_block_says_little() -> None:
    c = compared([100, 60, 100], [100, 40, 100])
    assert c.violations.value == pytest.approx(1.5) and c.points.low < 0 < c.points.high
    few = compared([100, 100, 99], [100, 99, 97])
    for ratio in (c.violations, few.violations):
        assert ratio.low < 1 < ratio.high


@pytest.mark.parametrize("mine", [[0, 0], [5, 8]])
def test_goodput_over_a_rival_that_had_none_is_no_number(mine: list[int]) -> None:
    c = compared(mine, [0, 0])
    assert math.isnan(c.goodput.value)
    assert results_table._shown(c.goodput) == "-"


def test_the_published_rules_are_not_silently_left_out(store: Store) -> None:
    """They are compared in a table of their own, so the verdict has to say how that went."""
    page = write_page(store).read_text()
    assert "best of all other systems" not in page
    n = len(Results(store).points())
    losing = "`adaserve`, the published rules, is not among the others: Of 2 points: 2 better"
    assert losing in page and f"Of {n} points" in page
    assert "| point | points | fewer violations | goodput | verdict |" in page


def test_a_substitute_for_the_default_is_neither_its_own_rival_nor_taken_for_gated(tmp_path: Path) -> None:
    """Where `priced` does not play, the published rules are judged, with SGLang's prefills."""
    plan = replace(PLAN, policies=("chain-4", "chain-4+gate", "adaserve"), axes=("load",))
    page = write_page(finished_sweep(tmp_path / "s", plan, tpot_ms)).read_text()
    assert "`adaserve` against the best of the other systems" in page
    assert "is not among the others" not in page and "`adaserve` against `adaserve`" not in page
    assert "Without +gate, only `priced` has our prefills and gate" in page
    assert "Systems as they are" in page and "with the same gate and prefills for all, at" not in page


def test_modes_of_prefills_are_compared_with_the_default_and_no_rivals(tmp_path: Path) -> None:
    """The default policy with another mode has no other policy's rules, and other policies with one have not
    our gate."""
    plan = replace(PLAN, policies=("priced", "priced+slack", "turbospec+exclusive"), axes=("load",))
    page = write_page(finished_sweep(tmp_path / "s", plan, tpot_ms)).read_text()
    assert "`priced` against `priced+slack`:" in page and "| load0.60 |" in page
    assert "Of 0 points" not in page and "| best baseline |" not in page
    assert "Systems as they are" not in page and "with the same gate and prefills for all, at" not in page


def test_both_slos_count_and_each_is_shown_alone(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", PLAN, tpot_ms)
    for k, name in enumerate(("load0.60.priced.s0.b0", "load0.60.priced.s1.b1")):
        records = [
            request(i, i / 3, "coding", 13.0 if i < 6 else 9.0, ttft_s=0.31 if i % 2 else 0.3)
            for i in range(60)
        ]
        write_records(store.records_path(name), records)
        assert sum(r.attained for r in records) == 27 and k < 2
    outcome = Results(store).get(Point(0.6), "priced")
    assert outcome is not None
    other = [r for n in ("s0.b1", "s1.b0") for r in store.records(f"load0.60.priced.{n}")]
    shares = {k: outcome.attainment(k).value for k in ("attained", "met_tpot", "met_ttft")}
    assert shares["met_ttft"] == pytest.approx((60 + 120) / 240)
    assert shares["met_tpot"] == pytest.approx((108 + sum(r.met_tpot for r in other)) / 240)
    assert shares["attained"] == pytest.approx((54 + sum(r.met_tpot for r in other)) / 240)


def test_only_what_all_requests_attained_is_100_percent(tmp_path: Path) -> None:
    """Here one request of 240 was late; the class whose requests all were in time says so beside it."""
    late = Case(Point(0.6), "priced", 0), 0
    plan = replace(PLAN, axes=("load",))
    store = finished_sweep(tmp_path / "s", plan, lambda c, i: 13.0 if (c, i) == late else 9.0)
    page = write_page(store).read_text().partition("### load0.60 ")[2]
    (row,) = [r for r in page.splitlines() if r.startswith("| **priced** |")][:1]
    both, tpot, ttft, chat, coding, *_ = (cell.strip() for cell in row.split("|")[2:])
    assert both.partition(" ")[0] == tpot == "99.6" and (ttft, chat) == ("100", "100")
    assert 99 <= float(coding) < 100
    (ax,) = figures._ablation(Results(store)).axes
    bars = dict(zip(("none", "chain-4", "adaserve", "priced"), ax.texts, strict=True))
    assert (bars["priced"].get_text(), bars["chain-4"].get_text()) == ("99.6%", "100%")


def test_what_a_system_lacks_is_left_out_and_nothing_is_a_number(tmp_path: Path) -> None:
    """A block without one of the classes, whose server drafted nothing."""
    plan = replace(PLAN, policies=("chain-4", "priced"), axes=("load",), loads=(0.6,), seeds=(0,), blocks=1)
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    case = Case(Point(0.6), "priced", 0)
    records = [request(i, i / 3, "coding", 9.0) for i in range(60)]
    write_records(store.records_path(case.id), records)
    line = case_line(case, records)
    store.add({**line, "server": {**line["server"], "tree_nodes": 0.0}})
    (row, *_) = [
        r for r in write_page(store).read_text().splitlines() if r.startswith("| **priced** | 100.0 |")
    ]
    assert [cell.strip() for cell in row.split("|")[5:8]] == ["-", "100", "-"] and "nan" not in row
    results = Results(store)
    _, nodes = figures._accepted(results).axes
    drawn = {c.get_label(): c.lines[0].get_ydata().tolist() for c in nodes.containers}
    assert drawn == {"chain-4": [2.5], "priced": [0.0]}


def test_the_highest_load_at_which_the_best_rival_attains_a_third_is_judged(tmp_path: Path) -> None:
    plan = SweepPlan(
        policies=("turbospec", "turbospec+gate", "adaserve", "priced"), loads=(0.3, 0.6, 1.0), seeds=(0,)
    )
    late = {0.3: 9.0, 0.6: 9.0, 1.0: 99.0}

    def slow(case: Case, _: int) -> float:
        return 9.0 if case.policy in ("priced", "adaserve", "turbospec+gate") else late[case.point.load]

    results = Results(finished_sweep(tmp_path / "s", plan, slow))
    assert results.judged() == Point(0.6), "adaserve is compared apart"
    assert results.judged(gated=True) == Point(1.0)
    page = write_page(results.store).read_text()
    assert "Systems as they are, at load0.60" in page
    assert "Systems with the same gate and prefills for all, at load1.00" in page
    assert "`priced` against `adaserve`" in page and "TTFT: coding 5 x prefill + 250 ms" in page


def test_lengths_that_were_tried_are_not_reported(tmp_path: Path) -> None:
    plan = replace(
        PLAN, policies=("chain", "priced"), side_policies=("priced",), axes=("load",), lengths=(4,)
    )
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    for case in plan.tuning_cases():
        records = [request(i, i / 3, "coding", 9.0) for i in range(9)]
        write_records(store.records_path(case.id), records)
        store.add(case_line(case, records))
    assert "chain: 4 at load 0.3, 4 at load 0.6" in write_page(store).read_text()
    assert set(Results(store).at(Point(0.6))) == {"chain", "priced"}


def write_page(store: Store) -> Path:
    write_all(store, None, Console(quiet=True))
    return store.folder / "README.md"


def test_a_sweep_without_a_finished_block_has_nothing_to_show(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", replace(PLAN, policies=("none",), axes=("load",)), tpot_ms)
    (store.folder / "cases.jsonl").unlink()
    with pytest.raises(SweepError, match="finished"):
        write_all(store, None, Console(quiet=True))


def test_blocks_whose_load_test_was_not_valid_are_named(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", replace(PLAN, axes=("load",)), tpot_ms)
    odd, older, fine, *_ = store.finished().values()
    store.add({**odd, "lag_p99_ms": 12.0, "invalid_reasons": ["answers were read late"]})
    store.add({**older, "lag_p99_ms": 13.0})
    store.add({**fine, "invalid_reasons": []})
    _, _, troubles = write_page(store).read_text().partition("## Troubles\n\n")
    assert troubles.splitlines() == [
        f"- {odd['id']}: answers were read late", f"- {older['id']}: requests left up to 13 ms late (p99)"
    ]  # fmt: skip


def test_a_block_whose_requests_were_never_sent_has_no_goodput(tmp_path: Path) -> None:
    assert Block.of([request(0, 0.0, "coding", 99.0)]).goodput == 0.0


def test_an_older_folder_is_neither_drawn_nor_continued(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", PLAN, tpot_ms)
    store.write_head({**store.head(), "schema_version": 1})
    for call in (Results, partial(plan_of, Options({}))):
        with pytest.raises(SweepError, match="older version"):
            call(store)


def test_only_blocks_that_both_have_are_compared(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", replace(PLAN, seeds=(0,)), tpot_ms)
    store.write_head({**store.head(), "plan": PLAN.to_json()})
    extra = Case(Point(0.6), "priced", 1)
    records = [request(i, i / 3, "coding", 99.0) for i in range(60)]
    write_records(store.records_path(extra.id), records)
    store.add(case_line(extra, records))
    c = Results(store).against_best(Point(0.6), "priced")
    assert c is not None and c.points.value > 0, "the bad seed has no counterpart"


def test_what_the_plugin_costs_is_the_median_of_paired_rounds(tmp_path: Path) -> None:
    store = finished_sweep(tmp_path / "s", PLAN, tpot_ms)
    assert Results(store).idle("tpot_ms") is None
    # The third round fell into a slow minute, which both servers had.
    times = {"none": [10.0, 11.0, 30.0], "sglang": [10.0, 10.0, 24.0]}
    rounds = {name: {"tpot_ms": v, "saturated_rps": v} for name, v in times.items()}
    store.write_head({**store.head(), "idle_rounds": rounds})
    idle = Results(store).idle("tpot_ms")
    assert idle is not None
    assert idle[:2] == (11.0, 10.0) and idle[2].value == pytest.approx(1.1)
    assert idle[2].low == pytest.approx(1.0) and idle[2].high == pytest.approx(1.25)
    page = write_page(store).read_text()
    assert "| one request, ms per token | 11.00 | 10.00 | 1.10x [1.00, 1.25] |" in page


def test_plain_decoding_is_compared_with_sglang_on_the_same_blocks(tmp_path: Path) -> None:
    """SGLang plays the first block alone where it is not among the systems."""
    store = finished_sweep(tmp_path / "s", PLAN, lambda c, _: 30.0 if (c.seed, c.block) != (0, 0) else 10.0)
    assert "| load0.30, mean TPOT, ms | 10.0 | 10.0 | 1.00x |" in write_page(store).read_text()


def test_everything_is_written_again_from_the_records(store: Store) -> None:
    written = write_all(store, None, Console(quiet=True))
    pictures = [w for w in written if w.endswith(".png")]
    assert set(pictures) == {
        "attainment-load.png", "attainment-share.png", "attainment-scale.png", "violations-load.png",
        "accepted-tokens.png", "peaks.png", "time-breakdown.png", "ablation.png", "objectives.png",
    }  # fmt: skip
    page = (store.folder / "README.md").read_text()
    for name in pictures:
        data = (store.folder / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
        assert f"]({name})" in page
    assert "adaserve bench sweep --seconds 20" in page, "the exact command"
    assert "chain-4" in page and "better" in page
    before = {p.name: p.read_bytes() for p in store.folder.iterdir() if p.is_file()}
    write_all(store, None, Console(quiet=True))
    assert before == {p.name: p.read_bytes() for p in store.folder.iterdir() if p.is_file()}


def test_a_sweep_that_has_hardly_begun_can_be_drawn(tmp_path: Path) -> None:
    plan = replace(PLAN, seeds=(0,), axes=("load",))
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    lines = (store.folder / "cases.jsonl").read_text().splitlines()
    (store.folder / "cases.jsonl").write_text(lines[0] + "\n")
    said = io.StringIO()
    assert "README.md" in write_all(store, None, Console(file=said))
    assert not said.getvalue(), "there is nothing to compare yet"
    assert "1 of " in (store.folder / "README.md").read_text()


@pytest.mark.parametrize(("axis", "first"), [("peaks", "chain-4"), ("load", "sglang")])
def test_a_sweep_that_ends_in_the_middle_of_a_point_can_be_drawn(
    tmp_path: Path, axis: str, first: str
) -> None:
    """Systems play a block in random order: those that a figure compares may be among the last, and the first
    one may be SGLang, which is there to be compared with `none` alone."""
    plan = replace(PLAN, seeds=(0,), axes=("load", "peaks"), side_policies=("none", "chain-4", "priced"))
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    every = list(store.finished().values())
    there = [line for line in every if axis == "peaks" and "peaks" not in line["point"]]
    there += [line for line in every if line not in there and line["policy"] == first][:1]
    (store.folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in there))
    assert f"{len(there)} of " in write_page(store).read_text()


def test_arrivals_are_drawn_as_they_came_where_blocks_are_missing(tmp_path: Path) -> None:
    """Of one seed a third is missing there: no fewer requests a second came at that time."""
    plan = replace(PLAN, axes=("peaks",), side_policies=("priced",), blocks=1)
    store = finished_sweep(tmp_path / "s", plan, tpot_ms)
    every = list(store.finished().values())
    there = [c for c in every if (c["seed"], c["block"]) != (1, 1)]
    assert len(there) == len(every) - 1
    (store.folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in there))
    arrivals = figures._peaks(Results(store)).axes[0]
    rate_rps = sum(np.asarray(line.get_ydata()) for line in arrivals.lines)
    assert rate_rps == pytest.approx(np.full(20, 60 / plan.seconds), rel=0.1)


def test_the_table_of_claims_is_put_between_its_marks(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# before\n{BEGIN}\nstale\n{END}\nafter\n")
    runs = tmp_path / "2026-01-01-simulation" / "paper"
    runs.mkdir(parents=True)
    cells = {"priced": 0.05, "adaserve": 0.1, "chain-4": 0.2, "none": 0.6, "clairvoyant": 0.01}
    line = {"workload": "w", "accept_length": 2.0}
    (runs / "runs.jsonl").write_text(
        "".join(
            json.dumps({**line, "policy": p, "violations": v, "token_goodput": 1 - v}) + "\n"
            for p, v in cells.items()
        )
    )
    assert {name: set(found) for name, found in simulated(tmp_path).items()} == {"w": set(cells)}
    fill_readme(path, Results(store))
    text = path.read_text()
    assert text.startswith("# before\n") and text.endswith("after\n") and "stale" not in text
    rows = {
        r.split("|")[1].strip(): [c.strip() for c in r.split("|")[2:5]]
        for r in text.splitlines()
        if r.startswith("|")
    }
    ours = rows["Fewer SLO violations than the best baseline, largest ratio"]
    assert ours[0].startswith("up to 4.3x") and "4.00x" in ours[1]
    assert ours[2].startswith("7.33x [") and ours[2].endswith("] (load0.60-urgent0.90)")
    both = "`priced` 1.19x (w), `adaserve` 1.12x (w)"
    assert rows["Goodput over the best baseline, largest ratio"][1] == both
    assert ours[1] == "`priced` 4.00x (w), `adaserve` 2.00x (w)"
    _, no_load, highest = rows["The same at the highest load"]
    assert no_load == "-", "workloads of the simulator are no loads of this host"
    assert highest.startswith("`priced` 1.42x [1.29, 1.57], `adaserve` 1.26x")
    better = "`priced` +26.7 points against chain-4: better, `adaserve` +16.7 points against chain-4: better"
    assert rows["Light load"][2] == f"{better} at load 0.3"
    assert rows["Violations of plain decoding, over the loads"][1:] == ["60% to 60%", "73% to 73%"]
    published = rows["Our policy against the published rules: fewer violations"]
    assert published[1].startswith("2.00x") and published[2].startswith("2.00x [1.31, 3.06] at load 0.3, ")
    assert rows["Selection"][2] == "0.15% of a decode iteration"
    assert rows["Violations at the limit"][1] == "`priced` 5.0%, told every outcome 1.0% (w)"
    fill_readme(path, Results(store))
    assert path.read_text() == text
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(SweepError, match="sweep: begin"):
        fill_readme(tmp_path / "bare.md", Results(store))


def test_requests_that_were_not_answered_are_violations() -> None:
    rows = [TraceRow(float(k), 10, 41, slo_class="coding", slo_ttft_ms=9.0) for k in range(3)]
    cut_off = request(1, 1.0, "coding", 5.0)
    cut_off.error = "interrupted"
    found = settled([request(0, 0.0, "coding", 5.0), cut_off], rows)
    assert [r.attained for r in found] == [True, False, False]
    assert all(r.judged for r in found), "the client hung up, but because nobody answered"
    assert [r.error is None for r in found] == [True, False, False]
    assert found[2].slo_ttft_ms == 9.0


def report(iterations: int, buckets: list[tuple[int, float]]) -> dict[str, object]:
    """The first of the buckets (iterations, tokens) is all that a server has left of older ones."""
    older, *kept = (
        {
            "iterations": n,
            "sums": {"running": 2.0 * n, "new_tokens": tokens, "verify_tokens": 8.0 * n,
                     "depth": 3.0 * n, "budget": 20.0 * n, "draft_s": 0.1 * n, "select_s": 0.01 * n,
                     "verify_s": 0.5 * n, "total_s": 0.7 * n},
        }
        for n, tokens in buckets
    )  # fmt: skip
    return {
        "times": {"decode_s": 0.7 * iterations, "prefill_s": 0.5 * iterations, "iterations": iterations,
                  "loop_s": 0.8 * (iterations - 4), "loops": iterations - 4, "prefills": 0.0,
                  "mixed": 0.2 * iterations, "target_s": 0.4 * iterations, "draft_s": 0.05 * iterations},
        "stats": {"older": older, "buckets": kept},
    }  # fmt: skip


@pytest.mark.parametrize(
    "after", [[(0, 0.0), (10, 20.0), (14, 48.0), (20, 80.0)], [(24, 68.0), (20, 80.0)], [(44, 148.0)]]
)
def test_the_servers_counters_are_taken_between_two_reports(after: list[tuple[int, float]]) -> None:
    """Also where a case takes so long that a server no longer keeps its beginning apart."""
    before = report(14, [(0, 0.0), (10, 20.0), (4, 8.0)])
    found = server_figures(before, report(44, after))
    assert found is not None
    assert found["iterations"] == 30
    assert found["tokens_per_verification"] == pytest.approx(120 / 60)
    assert found["tree_nodes"] == pytest.approx(3.0) and found["depth"] == pytest.approx(3.0)
    assert found["budget"] == pytest.approx(20.0)
    seconds = found["seconds"]
    assert seconds["draft"] == pytest.approx(1.5) and seconds["verify"] == pytest.approx(12.0)
    assert seconds["select"] == pytest.approx(0.3) and seconds["other"] == pytest.approx(30 * 0.24)
    assert seconds["prefill"] == pytest.approx(15.0) and found["mixed"] == 6
    assert found["loop_s"] == pytest.approx(0.8)
    assert server_figures(None, before) is None


def test_records_survive_being_packed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "records").mkdir()
    records = [replace(request(0, 0.5, "chat", 7.0), itl_ms=[1.0, 2.0]), request(1, 0.7, "coding", 14.0)]
    write_records(store.records_path("x"), records)
    back: list[RequestRecord] = store.records("x")
    assert [r.attained for r in back] == [True, False] and len(back[0].itl_ms) == 0
    assert back[0].tpot_s == pytest.approx(0.007)

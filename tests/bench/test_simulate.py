"""``adaserve simulate`` as a person uses it."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from adaserve.bench.simulate import cases as grid_cases
from adaserve.bench.simulate import fleet, grid
from adaserve.bench.simulate.fleet import SimulatedFleet
from adaserve.bench.simulate.grid import Grid
from adaserve.bench.simulate.hardware import Hardware
from adaserve.bench.simulate.traces import read_recorded, read_workload
from adaserve.cli import app
from adaserve.config import MAX_RUNNING, PREFILLS, AdaServeConfig
from adaserve.scheduler.acceptance_calibration import N_BINS
from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.costs.latency import ForwardCost
from adaserve.scheduler.costs.profile import Profile
from adaserve.scheduler.simulator.hardware import hardware_latency
from adaserve.scheduler.simulator.recorded import Recorded, RecordedChildren
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import simulate, violations
from adaserve.scheduler.simulator.workload import TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import PAPER_MIX, SLOConfig
from adaserve.slo.trace import TraceRow, write_jsonl


def simulate_command(words: str, *more: str | Path) -> Result:
    """``adaserve simulate`` with these words."""
    return CliRunner().invoke(app, ["simulate", *words.split(), *map(str, more)])


def output_of(words: str, *more: str | Path) -> str:
    """Of a command that succeeds."""
    got = simulate_command(words, *more)
    assert got.exit_code == 0, got.output
    return got.output


def test_writes_results(tmp_path: Path) -> None:
    policies = "--policy priced --policy small=adaserve:budget=64"
    said = output_of(f"run --trace synthetic:30:3 {policies} --seeds 0,1 --out", tmp_path / "out")
    assert "SLO violations" in said and "small" in said
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert {
        "config.yaml",
        "runs.jsonl",
        "summary.json",
        "table.md",
        "violations.png",
        "reliability.png",
    } <= written
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"slo_attainment", "by_class", "trace_sha256"} <= summary[0].keys()
    names = {(s["workload"], s["load_rps"], s["policy"], s["seed"]) for s in summary}
    assert names == {
        ("synthetic:30:3", 3.0, policy, seed) for policy in ("priced", "small") for seed in (0, 1)
    }


@pytest.mark.parametrize("prefill", ["fixed", "mixed", "slack", "exclusive"])
def test_prompts_are_read_in_chunks_of_the_given_size(prefill: str) -> None:
    few, many = (
        output_of(f"run --trace synthetic:20:3 --policy none --prefill {prefill} --chunk {size}")
        for size in (64, 2048)
    )
    assert few != many


def test_prompts_are_read_as_servers_read_them() -> None:
    """One of a server's modes, with its order and gate; ``fixed`` is the paper's artifact. What is given
    counts."""

    def replica(**given: Any) -> ReplicaConfig:
        options = {name: None for name in Grid.__dataclass_fields__} | {
            "trace": ["synthetic:3:1"], "policy": ["priced"], "model": "llama-3.1-8b", "gpu": "h100", "tp": 1,
            "loads": (1.0,), "seeds": (0,), "shed": False, "lag": False, "replicas": 1, "router": "slo",
            "eos_share": 0.0,
        }  # fmt: skip
        return Grid(**options | given).prepared()[0][0].config.replica

    served = AdaServeConfig().for_prefills
    assert [replica(prefill=mode).mixed for mode in PREFILLS] == [True, False, False]
    assert replica(prefill="mixed").prefill == served(chunk_tokens=512)
    assert replica(prefill="slack").prefill == served(chunk_tokens=4096)
    assert replica(prefill="exclusive").prefill == PrefillConfig(4096)
    fixed = replica(prefill="fixed")
    assert fixed.mixed and fixed.prefill == PrefillConfig(512)
    given = replica(prefill="mixed", order="fcfs", gate=0.0, chunk=64).prefill
    assert given == PrefillConfig(64, "fcfs", None, None, "slack")
    assert replica(prefill="exclusive", order="deadline", gate=1.1).prefill == PrefillConfig(
        4096, "deadline", 1.1
    )


def test_seeds_of_a_drawn_trace_are_seeds_of_one_load() -> None:
    said = output_of("run --trace synthetic:20:3 --policy none --loads 0.5,1 --seeds 0,1")
    table = said.partition("### SLO violations")[2].partition("### Mean TTFT")[0]
    assert re.findall(r"\| synthetic:20:3 \| (\S+) \| \S+ \+- \S+ \|", table) == ["1.5", "3"]


def test_a_chain_is_as_long_as_its_name_says(tmp_path: Path) -> None:
    policies = "--policy chain-8 --policy chain-12 --policy cut=chain-12:d_max=3"
    output_of(f"run --trace synthetic:10:3 {policies} --out", tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())
    tokens = {row["policy"]: row["accept_length"] for row in rows}
    assert tokens["cut"] < tokens["chain-8"] < tokens["chain-12"]


def test_a_file_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is part of a file of records."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "synthetic").mkdir()
    write_jsonl(synthetic_trace(5, 3.0, 0, PAPER_MIX).rows, "synthetic/morning.jsonl")
    output_of("run --trace synthetic/morning.jsonl --policy none --out out")
    (records,) = (tmp_path / "out").glob("requests-*")
    assert records.name.startswith("requests-morning-")


MANY = "".join(
    f" --policy {name}" for name in ("priced", "none", "adaserve", *(f"chain-{k}" for k in "1234"))
)
"""More policies than fit beside each other: they stand in lines."""


def test_seeds_need_not_have_the_same_classes() -> None:
    said = output_of(f"run --trace synthetic:4:3 --seeds x3{MANY}")
    heads = next(line for line in said.splitlines() if line.startswith("| policy"))
    assert all(f"| {name}, % |" in heads for name in PAPER_MIX)


def test_a_replica_without_iterations_has_no_means() -> None:
    said = output_of(f"run --trace synthetic:5:3 --kv-tokens 1{MANY}")
    assert re.search(r"\| priced \| 1 \| 100\.0 \|.*\|  \|  \|$", said, re.MULTILINE)


def test_a_case_is_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of the same simulation."""
    played: list[object] = []
    monkeypatch.setattr(grid_cases, "simulate", lambda *case: played.append(case) or simulate(*case))
    output_of("run --trace synthetic:10:3 --policy none --seeds 0,1 --out", tmp_path)
    assert len(played) == 2 and {"timeline.png", "reliability.png"} <= {p.name for p in tmp_path.iterdir()}


def test_a_class_that_never_speculates_has_no_reliability(tmp_path: Path) -> None:
    """Of answers of two tokens the first is the prefill's, and the second needs no draft."""
    rows = [TraceRow(0.1 * i, 50, 2 if i % 2 else 100, "chat" if i % 2 else "coding") for i in range(10)]
    write_jsonl(rows, tmp_path / "trace.jsonl")
    output_of("run --policy priced --trace", tmp_path / "trace.jsonl", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "reliability.png").stat().st_size


def test_times_of_nobody_are_not_zero() -> None:
    """Where the cache has room for no request, nobody has waited 0 ms for a token."""
    said = output_of("run --trace synthetic:20:3 --kv-tokens 1")
    assert "100.0" in said
    assert not re.search(r"\| 0\.0", said.partition("### Mean TTFT")[2].partition("### Goodput")[0])


def test_results_are_continued_and_never_overwritten(tmp_path: Path) -> None:
    """Rows, records and config.yaml of one folder have the same settings."""
    out = tmp_path / "out"

    def rows(more: str = "") -> list[dict[str, Any]]:
        output_of(f"run --trace synthetic:20:3 --policy chain-2 {more} --out", out)
        return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]

    assert len(rows()) == len(rows()) == 1
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for other in ("--tp 8", "--policy chain-2=chain-3"):
        got = simulate_command(f"run --trace synthetic:20:3 --policy chain-2 {other} --out", out)
        assert got.exit_code == 2 and re.search(r"other\s+settings|are called", got.output)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert len(rows("--seeds 0,1")) == 2 and len(list(out.glob("requests-*"))) == 2
    with (out / "runs.jsonl").open("a") as f:
        f.write('{"workload": "cut of')
    output_of("run --trace synthetic:20:3 --out", out)
    assert (out / "runs.jsonl").read_text().splitlines()[3].startswith('{"workload": "synthetic')
    of_a_load_test = tmp_path / "other" / "summary.json"
    of_a_load_test.parent.mkdir()
    of_a_load_test.write_text("{}")
    got = simulate_command("run --trace synthetic:20:3 --out", of_a_load_test.parent)
    assert got.exit_code == 2 and "is not empty" in got.output and of_a_load_test.read_text() == "{}"


def test_a_class_that_nobody_knows_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Also one of the last case only, which would end all of them."""
    classes, trace = tmp_path / "classes.yaml", tmp_path / "trace.jsonl"
    classes.write_text("classes: {chat: {tpot_ms: 50}}")
    write_jsonl(synthetic_trace(9, 3.0, 0, {"chat": 1.0}).rows, trace)
    words = f"run --trace {trace} --trace synthetic:20:3 --slo-config {classes} --out"
    got = simulate_command(words, tmp_path / "out")
    assert got.exit_code == 2 and re.search(r"unknown SLO class '\w+': known classes\s+are chat", got.output)
    assert not (tmp_path / "out").exists()


def test_loads_of_nearly_the_same_rate_are_refused(tmp_path: Path) -> None:
    """They would share a file of records."""
    got = simulate_command("run --trace synthetic:20:3 --policy none --loads 1,1.00001 --out", tmp_path)
    assert got.exit_code == 2 and not list(tmp_path.glob("requests-*"))


def test_a_setting_that_is_not_yaml_is_one_sentence() -> None:
    got = simulate_command("run --trace synthetic:20:3 --policy priced:d_max=[1")
    assert got.exit_code == 2 and "d_max=[1" in got.output


def test_a_case_is_done_when_its_records_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(grid_cases, "write_records", interrupted)
        assert simulate_command("run --trace synthetic:20:3 --out", tmp_path).exit_code
    assert not list(tmp_path.glob("requests-*"))
    output_of("run --trace synthetic:20:3 --out", tmp_path)
    (path,) = tmp_path.glob("requests-*.jsonl.gz")
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 20


def test_capacity_knows_how_much_memory_there_is() -> None:
    """Where hardly any request fits beside another one, nobody is slowed down and all wait. Without a TTFT
    SLO waiting is no miss, so it is shown."""

    def attained(more: str = "") -> tuple[float, float]:
        said = output_of(f"capacity --trace synthetic:60:6 --policy none --target 0.3 {more}")
        share, ttft_s = re.findall(r" 1 replica: ([0-9.]+)% attained, TTFT ([0-9.]+) s \(p99", said)[0]
        return float(share), float(ttft_s)

    (small, waited_s), (large, soon_s) = attained("--kv-tokens 2500"), attained()
    assert small > large and waited_s > 10 * soon_s
    nobody = output_of("capacity --trace synthetic:9:6 --kv-tokens 1")
    assert " 1 replica: 0.00% attained\n" in nobody
    assert "9 replicas: 0.00%" in nobody and "95% attainment: no number is enough" in nobody
    assert "95% attainment: more than 2" in output_of("capacity --trace synthetic:9:6 --kv-tokens 1 --most 2")


def test_fit_reports_errors_and_bad_files(tmp_path: Path) -> None:
    points = np.array([[t, 0.0, 1.0, 0.03 + 2e-4 * t] for t in (1.0, 8.0, 64.0, 256.0)])
    Profile(points, points).save(tmp_path / "p.json")
    assert re.search(r"verify +linear +0.0% +0.0% +0.0% +chosen", output_of("fit", tmp_path / "p.json"))
    got = simulate_command("fit", tmp_path / "none.json")
    assert got.exit_code == 2 and "adaserve profile" in got.output


def test_fleets_serve_as_servers_do() -> None:
    """With the gate, prefills and trees of a server, iteration by iteration while the trace is short."""
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    priced, chain = (SimulatedFleet.of(policy, latency, None, 0) for policy in ("priced", "chain-2"))
    assert priced.config.replica.prefill == AdaServeConfig().for_prefills()
    assert chain.config.replica.prefill.gate is None
    settings = AdaServeConfig().for_policies(latency=latency)
    assert priced.config.policy_config == chain.config.policy_config == settings
    assert priced.config.replica.max_running == MAX_RUNNING
    of_cpu = [SimulatedFleet.of(policy, latency, None, 0, mixed=True) for policy in ("priced", "chain-2")]
    assert [f.config.replica.mixed for f in (priced, chain, *of_cpu)] == [False, False, True, False]
    deep = SimulatedFleet.of("chain-7", latency, None, 0).config.policy_config
    assert settings.d_max == 5 and deep is not None and deep.d_max == 7
    trace = read_workload("synthetic:100:4", 0)
    requests = make_requests(trace, SLOConfig(), priced.baseline_s, TextModel(), 0)
    records = simulate(requests, replace(priced.config, replicas=2)).records()
    later = priced.attainment(trace, SLOConfig(), warm_up=30)(2)
    assert later == pytest.approx(1 - violations(records[30:])), "served, and not counted"
    attainment = priced.attainment(trace, SLOConfig())
    assert attainment(2) == pytest.approx(1 - violations(records))
    assert attainment(1) < attainment(2)


def test_prompts_share_forwards_where_a_profile_is_of_a_cpu(tmp_path: Path) -> None:
    points = np.array([[t, 0.0, 1.0, 0.03 + 2e-4 * t] for t in (1.0, 8.0, 64.0, 256.0)])
    for device in ("cpu", "NVIDIA H200"):
        Profile(points, points, meta={"device": device}).save(tmp_path / f"{device}.json")
    cpu, gpu = (Hardware("", "", 1, tmp_path / f"{name}.json").on_cpu() for name in ("cpu", "NVIDIA H200"))
    assert cpu and not gpu and not Hardware("llama-3.1-8b", "h100", 1, None).on_cpu()


def test_long_traces_and_fleets_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same gate and prefills; nobody is left out of what `fleet` says."""
    said = simulate_command("fleet --trace synthetic:120:8 --replicas 2 --policy chain-2")
    served = json.loads(said.stdout)
    assert served["requests"] == 120 and 0.2 < served["attainment"] <= 1
    of = SimulatedFleet.of("chain-2", hardware_latency("llama-3.1-70b", "a100", 4), None, 0)
    trace = read_workload("synthetic:120:4", 0)
    played = of.attainment(trace, SLOConfig())(1)
    monkeypatch.setattr(fleet, "DETAILED", 100)
    assert of.attainment(trace, SLOConfig())(1) == pytest.approx(played, abs=0.12)


def test_forecasts_are_compared_with_what_was_delivered() -> None:
    said = output_of("forecast --trace synthetic:40:1 --policy none --skip 10")
    assert "30 requests" in said and said.count("%") == 7
    alone = output_of("forecast --trace synthetic:9:0.001 --policy none --skip 0")
    assert "foreseen  nothing: each request ran alone" in alone and "nan" not in alone
    short = simulate_command("forecast --trace synthetic:40:1 --policy none --skip 40")
    assert short.exit_code == 2 and "no request is left" in short.output
    small = simulate_command("forecast --trace synthetic:40:1 --gpu l40s --tp 1")
    assert small.exit_code == 2 and "does not fit" in small.output, "its cache is that of the hardware"


def test_capacity_of_what_a_fleet_recorded(tmp_path: Path) -> None:
    """Two replicas served twice what one can: each file alone needs one replica, both need two."""
    files = []
    for i in range(2):
        trace = synthetic_trace(200, 4.0, seed=i, mix={"chat": 1.0})
        rows = [replace(row, arrival_s=row.arrival_s + 1.8e9) for row in trace.rows]
        files.append(tmp_path / f"replica-{i}.jsonl")
        write_jsonl(reversed(rows), files[-1])

    def needed(*paths: Path) -> int:
        traces = [word for path in paths for word in ("--trace", path)]
        said = output_of("capacity --policy none --target 0.9", *traces)
        return int(re.findall(r"minimum replicas for 90% attainment: (\d+)", said)[0])

    assert needed(files[0]) < needed(*files)
    assert read_recorded([str(files[0])], 0).rps == pytest.approx(4.0, rel=0.3)
    assert len(read_recorded(list(map(str, files)), 0)) == 400


def test_capacity_goes_by_the_times_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much slower the host was: nothing else explains why it finds more replicas than 'run',
    which takes no times of the recording."""
    found = Recorded(RecordedChildren(np.array([0.5]), 0.5, np.ones(N_BINS)), 2.5, ForwardCost(2.0), True)
    monkeypatch.setattr(fleet, "load_recorded", lambda paths, latency: found)
    words = "capacity --trace synthetic:30:3 --policy none --most 1"
    said = output_of(f"{words} --recorded any.jsonl --gpu h100")
    assert "iterations take 2.50 times what llama-3.1-70b on 4 h100 would take" in said
    assert float(re.findall("TTFT ([0-9.]+) s", said)[0]) > 2.0 * 2.5
    assert "iterations take" not in output_of(words)
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    policies = "priced", "none"
    mixed = [SimulatedFleet.of(p, latency, None, 0, [Path()]).config.replica.mixed for p in policies]
    assert mixed == [True, False], "prompts shared forwards on the server, whose policy looked at SLOs"


@pytest.mark.parametrize("stated", [{"slo_ttft_ms": 500.0}, {"slo_x_baseline": 2.0}, {"slo_tpot_ms": 50.0}])
def test_a_trace_that_states_slos_gets_no_others(stated: dict[str, float], tmp_path: Path) -> None:
    """As a server's recording, whose clients state a TTFT and nothing else."""
    path, rows = tmp_path / "recorded.jsonl", (TraceRow(0.0, 9, 9), TraceRow(1.0, 9, 9, **stated))  # type: ignore[arg-type]
    write_jsonl(rows, path)
    assert read_workload(str(path), 0).rows == rows
    assert read_recorded([str(path)], 0).rows == rows
    write_jsonl(rows[:1], path)
    assert read_workload(str(path), 0).rows[0].slo_class in PAPER_MIX


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy best", "urgency-K, fcfs, stta, sep-pipe, clairvoyant, true-probabilities"),
        ("--policy priced:colour=red", "unknown setting 'colour': known are budget"),
        ("--policy priced:latency=3", "unknown setting 'latency'"),
        ("--policy priced:d_max=two", "d_max is 'two': it should be a valid integer"),
        ("--policy priced:least_gain=x", "least_gain is 'x'"),
        ("--policy priced:learn_costs=maybe", "learn_costs is 'maybe'"),
        ("--policy priced:d_max", "d_max is None"),
        ("--policy fixed-tree:fixed_branching=[1,x]", "fixed_branching.1 is 'x'"),
        ("--policy fixed-tree:fixed_branching=[1", "are not KEY=VALUE"),
        ("--gpu b900", "unknown GPU"),
        ("--recorded any.jsonl --miscalibration 0.1", "leave --miscalibration or --recorded out"),
        ("--model llama-3.2-1b", "unknown target model 'llama-3.2-1b'"),
        ("--prefill never", "is not one of"),
        ("--loads 1,0", "numbers above 0"),
        ("--seeds -1", "not '-1'"),
        ("--trace synthetic:100:x", "not 'synthetic:100:x'"),
        ("--trace synthetic:0:1", "not 'synthetic:0:1'"),
        ("--trace synthetic:5:1", "2 traces are called 'synthetic:5:1'"),
        ("--policy priced --policy priced:d_max=3", "2 policies are called 'priced'"),
    ],
)
def test_errors_name_the_remedy(arguments: str, message: str) -> None:
    got = simulate_command(f"run --trace synthetic:5:1 {arguments}")
    assert got.exit_code == 2 and message in got.output.replace("\n", " ")


def test_a_load_that_is_named_twice_is_no_second_seed() -> None:
    assert "+- 0.0" not in output_of("run --trace synthetic:5:1 --policy none --loads 1,1.0")


def test_the_progress_bar_shows_a_trace_by_its_name() -> None:
    """`:100:` is an emoji to Rich."""
    got = simulate_command("run --trace synthetic:100:9 --policy none")
    assert "synthetic:100:9 9.00 rps none" in got.stderr


def test_a_long_case_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may take minutes."""
    shown: list[int] = []

    def watched(cases: Any, setting: Any, out: Any, progress: Any, records: bool) -> list[grid_cases.Row]:
        return grid_cases.run_grid(cases, setting, out, lambda arrived, _: shown.append(arrived), records)

    monkeypatch.setattr(grid, "run_grid", watched)
    output_of("run --trace synthetic:120:9 --policy none --seeds 0,1")
    assert shown == [0, 50, 100, 120, 170, 220]


@pytest.mark.parametrize("command", ["capacity", "fleet"])
def test_fleets_of_no_known_policy(command: str) -> None:
    got = simulate_command(f"{command} --trace synthetic:5:1 --policy best")
    assert got.exit_code == 2 and "error: unknown policy 'best'" in got.stderr

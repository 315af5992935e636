"""How folders of load tests are read and grouped, and what the page says of odd runs: rare classes, odd
names, figures that round badly."""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.loadgen import bench
from adaserve.loadgen.bench import class_cells, class_table
from adaserve.loadgen.report import build_charts, group_runs, write_report
from adaserve.loadgen.results import write_summary
from adaserve.loadgen.run_folder import Run, default_label, read_run
from adaserve.loadgen.web_tab import display_row
from adaserve.slo.run_summary import RequestRecord, percent


def record(number: int, slo_class: str = "coding", **values: Any) -> RequestRecord:
    """A request every half second that meets its SLO."""
    at_s = number / 2
    usual: dict[str, Any] = {
        "slo_ttft_ms": None, "slo_tpot_ms": 30.0, "last_token_s": at_s + 0.3, "output_tokens": 11,
    }  # fmt: skip
    made = RequestRecord(
        id=str(number), slo_class=slo_class, scheduled_s=at_s, sent_s=at_s,
        first_token_s=at_s + 0.1, **(usual | values),
    )  # fmt: skip
    made.judge()
    return made


def folder(path: Path, records: Sequence[RequestRecord], **summary: Any) -> Path:
    path.mkdir(parents=True)
    (path / "requests.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def page_of(runs: Sequence[Run], tmp_path: Path) -> str:
    return write_report(runs, tmp_path / "out", png=False).read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of the table of results."""
    table = page.partition("<tbody>")[2].partition("</tbody>")[0]
    lines = [re.findall(r"<td.*?</td>", row, re.S) for row in table.split("<tr")[1:]]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in line] for line in lines]


def test_each_row_stands_under_its_own_class(tmp_path: Path) -> None:
    few = [record(k) for k in range(4)]
    one = folder(tmp_path / "one", few)
    seeds = [folder(tmp_path / "two-seed0", few), folder(tmp_path / "two-seed1", [*few, record(4, "rare")])]
    page = page_of([read_run(f) for f in (one, *seeds)], tmp_path)
    assert [(row[0], row[1], row[5]) for row in rows(page)] == [
        ("coding", "one", "4"), ("", "two", "4"), ("rare", "two", "1"),
        ("all", "one", "4"), ("", "two", "4.5"),
    ]  # fmt: skip


def test_one_failure_among_several_seeds_is_not_rounded_away(tmp_path: Path) -> None:
    failed = record(9, error="HTTP 503")
    seeds = [[*(record(k) for k in range(9)), failed if seed == 1 else record(9)] for seed in range(3)]
    folders = [folder(tmp_path / f"priced-seed{n}", records) for n, records in enumerate(seeds)]
    page = page_of([read_run(f) for f in folders], tmp_path)
    assert [row[4:6] for row in rows(page)] == [["10", "0.3"]] * 2


def test_a_run_that_is_named_twice_is_one_seed(tmp_path: Path) -> None:
    """As by two patterns of a shell: its error bars would be those of two runs that agree."""
    run = str(folder(tmp_path / "priced-seed0", [record(k) for k in range(4)]))
    done = CliRunner().invoke(app, ["report", run, f"{run}/", f"other={run}", "--no-png"])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "priced-seed0" / "report.html").read_text()
    assert "2 runs · priced: 1 seed, other: 1 seed" in page


def test_runs_of_other_loads_are_no_seeds_of_one_setting(tmp_path: Path) -> None:
    """All without a tag are called alike."""
    names = ("20260101T000000Z-bench", "20260101T000100Z-bench", "20260101T000200Z-bench")
    first, other_seed, other_rate = [folder(tmp_path / name, [record(0)]) for name in names]
    for path, seed, rps in ((first, 0, 1.0), (other_seed, 1, 1.0), (other_rate, 0, 2.0)):
        (path / "config.yaml").write_text(f"seed: {seed}\nbaseline_ms: 2{seed}\narrivals: {{rps: {rps}}}\n")

    def said(*runs: str | Path) -> str:
        return CliRunner().invoke(app, ["report", *map(str, runs), "--no-png"]).stderr

    assert said(first, other_seed).startswith("report: ")
    assert "differ in arrivals: name each, as in NAME=" in said(first, other_rate)
    assert said(f"few={first}", f"many={other_rate}").startswith("report: ")


def test_the_models_of_all_runs_are_named(tmp_path: Path) -> None:
    folders = [folder(tmp_path / name, [record(0)], model=f"{name}-8b") for name in ("small", "large")]
    runs = [read_run(f) for f in folders]
    assert "model small-8b</p>" in page_of(runs[:1], tmp_path)
    assert "models small-8b, large-8b</p>" in page_of(runs, tmp_path)


@pytest.mark.filterwarnings("error:Glyph")
def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Matplotlib has ideas of its own about dollars and underscores, and no font for all scripts."""
    names = (r"a$\frac$b", "cost $1 to $2", "_first", "<b>bold</b>", "聊天")
    records = [record(k, name) for k, name in enumerate(names)]
    runs = [read_run(folder(tmp_path / str(k), records), label) for k, label in enumerate(names)]
    page = page_of(runs, tmp_path)
    texts = [html.unescape(t) for t in re.findall(r"<text[^>]*>([^<]*)</text>", page)]
    for name in names:
        of_classes, of_settings = f"{name} attainment", f"Timeline of {name}"
        assert {of_classes, of_settings} <= {t.strip() for t in texts}, name
        assert sum(t.strip() == name for t in texts) == 4, "in two legends, and below the bars of two figures"
        assert f">{html.escape(name)}</td>" in page


@pytest.mark.parametrize("suffix", ["", "-llama-3.1-8b-instruct-at-4-requests"])
def test_no_name_is_cut_off_or_hides_another(suffix: str, tmp_path: Path) -> None:
    """Few short names lie side by side, also where there is little more room than they take."""
    names = ["coding", "summarization"] + [f"{k} of the assistant" for k in "abcdef" if suffix]
    records = [record(k, name) for k, name in enumerate(names)]
    servers = ("priced", "sglang", "chain", "none") if suffix else ("priced", "sglang")
    runs = [read_run(folder(tmp_path / f"{server}{suffix}", records)) for server in servers]
    for chart in build_charts(group_runs(runs)):
        chart.figure.draw_without_rendering()
        (legend,) = chart.figure.legends
        drawn = legend.get_window_extent()
        assert 0 <= drawn.x0 < drawn.x1 <= chart.figure.bbox.x1, chart.title
        assert drawn.y1 < chart.figure.axes[0].get_window_extent().y0, chart.title
        assert suffix or legend._ncols > 1, "no row for each"
        labels = chart.figure.axes[0].get_xticklabels()
        boxes = [label.get_window_extent() for label in labels]
        apart = all(left.x1 < right.x0 for left, right in pairwise(boxes))
        assert apart != all(label.get_rotation() for label in labels), chart.title


def test_a_timeline_shows_classes_whose_requests_lie_far_apart(tmp_path: Path) -> None:
    rare = [record(number, "rare") for number in (20, 120, 220)]
    run = read_run(folder(tmp_path / "run", [*(record(k) for k in range(240)), *rare]))
    (chart,) = [c for c in build_charts(group_runs([run])) if c.name == "timeline"]
    (line,) = [x for x in chart.figure.axes[0].lines if x.get_label() == "rare attainment"]
    assert np.isfinite(line.get_ydata()).sum() == 3
    assert line.get_marker() == ".", "a point without neighbors has no line"


def test_only_all_is_100_percent(tmp_path: Path) -> None:
    assert [percent(v) for v in (0.0, 0.5, 0.97, 0.99949, 1.0)] == ["0.0", "50.0", "97.0", "99.9", "100.0"]
    assert [percent(v, 0) for v in (0.5, 0.994, 0.996, 1.0)] == ["50", "99", "99.6", "100"]
    late = record(0)
    late.last_token_s = 9.0
    late.judge()
    run = read_run(folder(tmp_path / "run", [late, *(record(k) for k in range(1, 2500))]))
    page = page_of([run], tmp_path)
    (row, _) = rows(page)
    assert (row[1].split()[0], row[2], row[3]) == ("99.96%", "99.96%", "\u2013"), "no request has a TTFT SLO"
    assert page.count(">99.96%</text>") == 2, "the bars of the class and of all"
    assert class_cells(run.summary)[5] == "99.96"
    live = {"name": "all", "requests": 2500, "failed": 0, "attainment": 0.9996, "good_tokens": 0}
    assert display_row(live)["attainment"] == "99.96"


def test_the_documentation_computes_the_figures_of_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From records of every kind: of the warm-up, failed, cut off, late, of one token, without an SLO."""
    records = [record(number, last_token_s=number / 2 + 0.2 + number / 20) for number in range(10)]
    records += [record(10, error="HTTP 503"), record(11, error="client_disconnect", slo_ttft_ms=None)]
    records += [record(12, output_tokens=1), record(13, slo_ttft_ms=50.0)]
    written = write_summary(folder(tmp_path / "run", records), 1.0, {}, [])
    page = Path(__file__).resolve().parents[2] / "docs" / "load-testing.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path / "run")
    exec(code, found := dict[str, Any]())
    assert 0.1 < found["attainment"] < 0.9
    assert found["attainment"] == pytest.approx(written["slo_attainment"], abs=1e-6)
    for name in ("ttft", "tpot"):
        assert found[f"{name}_ms"].mean() == pytest.approx(written[f"mean_{name}_ms"], abs=1e-4)


def test_the_page_is_there_though_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `adaserve bench serve | true`."""
    out = folder(tmp_path / "run", [record(1)])
    monkeypatch.setattr(bench, "run_bench", lambda *_: read_run(out).summary)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "stdout", unread)
        app(["bench", "serve", "--out", str(out)])
    assert (out / "report.html").exists()


@pytest.mark.parametrize("accept_length", [4.16, None])
def test_a_narrow_terminal_shows_every_figure(accept_length: float | None, tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "run", [record(k, "summarization") for k in range(1200)]))
    of_class = run.summary["by_class"]["summarization"]
    of_class.update(slo_tpot_ms=12.3, mean_tpot_ms=10.2, p99_tpot_ms=24.1)
    of_class.update(median_ttft_ms=1836.0, token_goodput=1230.8, accept_length=accept_length)
    with (terminal := Console(file=io.StringIO(), width=60)).capture() as table:
        terminal.print(class_table(run.summary))
    shown = table.get()
    figures = [cell for cell in class_cells(of_class) if cell != "-"]
    assert len(figures) == 7 + (accept_length is not None)
    assert [figure for figure in figures if figure not in shown] == []
    assert "\u2026" not in shown, "nothing is cut"
    assert ("accept" in shown) is (accept_length is not None)


@pytest.mark.parametrize("name", ["team[/x]", "chat [urgent]"])
def test_classes_of_a_trace_are_no_markup(name: str, tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "run", [record(0, name)]))
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with terminal.capture() as table:
        terminal.print(class_table(run.summary))
    assert name in table.get()
    shown = {"finished": 1, "by_class": [{"name": name, "attainment": 1.0}]}
    (tmp_path / "progress.json").write_text(json.dumps(shown))
    planned: Any = [record(0)]
    polls = iter([None, 0])
    process: Any = SimpleNamespace(poll=lambda: next(polls))
    bench._show_progress(process, tmp_path, planned, terminal)
    assert name in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_labels() -> None:
    assert default_label(Path("20260101T120000Z-adaserve-seed2")) == "adaserve"
    assert default_label(Path("20260101T120000Z-none")) == "none"
    assert default_label(Path("20260101T120000Z-chain-2")) == "chain-2", "a length is not a seed"
    assert default_label(Path("chain-2-s3")) == "chain-2"


@pytest.mark.parametrize("config", ["duration_s: 60\nwarmup_s: 5\n", "[", "5", None])
def test_a_run_without_a_summary_is_not_valid_and_has_its_warm_up(config: str | None, tmp_path: Path) -> None:
    """Everything of it was killed, or it still runs."""
    run = folder(tmp_path / "run", [record(1), record(12)], warmup_s=0)  # sent after 0.5 and 6 s
    if config is not None:
        (run / "config.yaml").write_text(config)
    assert read_run(run).summary["valid"]
    (run / "summary.json").unlink()
    summary = read_run(run).summary
    assert not summary["valid"] and "no summary.json" in summary["invalid_reasons"][0]
    assert summary["requests"] == (1 if "warmup_s" in (config or "") else 2)
    assert "is not valid" in page_of([read_run(run)], tmp_path)
    done = CliRunner().invoke(app, ["report", str(run), "--no-png", "--fail-under-attainment", "0"])
    assert done.exit_code == 4 and "no summary.json" in done.stderr


def test_seeds_are_one_sample_for_percentiles_and_no_proof_where_they_agree(tmp_path: Path) -> None:
    runs = []
    for seed, slow_s in enumerate((0.5, 8.1)):
        every = [record(k, last_token_s=k / 2 + (slow_s if k < 5 else 0.2)) for k in range(50)]
        runs.append(read_run(folder(tmp_path / f"priced-seed{seed}", every)))
    (group,) = group_runs(runs)
    (name,) = group.runs[0].summary["by_class"]
    tpot_ms = [1e3 * v for r in group.runs for v in r.arrays[name]["tpot"]]
    for of in (None, name):
        assert group.percentile_ms("tpot", 99, of) == pytest.approx(np.percentile(tpot_ms, 99))
    assert group.percentile_ms("tpot", 99) > 1.5 * (group.mean("p99_tpot_ms") or 0.0)
    one, other = (r.summary["mean_tpot_ms"] for r in group.runs)
    assert group.error("mean_tpot_ms") == pytest.approx(abs(one - other) / 2)
    shares = {r.summary["slo_attainment"] for r in group.runs}
    assert len(shares) == 1 and group.error("slo_attainment") == pytest.approx(0.03, abs=0.01)


def test_a_curve_ends_below_100_percent_only_where_requests_failed(tmp_path: Path) -> None:
    short, free = record(1, output_tokens=1, last_token_s=0.6), record(2, "free", slo_tpot_ms=None)
    run = read_run(folder(tmp_path / "run", [record(0), short, record(3, error="HTTP 503"), free]))
    assert sorted(run.arrays["coding"]["ratio"]) == [0.0, pytest.approx(2 / 3), float("inf")]
    (chart,) = [c for c in build_charts(group_runs([run])) if c.name == "tpot-ratio"]
    curves = {line.get_label(): max(line.get_ydata()) for line in chart.figure.axes[0].lines}
    assert curves["coding"] == pytest.approx(2 / 3) and "free" not in curves

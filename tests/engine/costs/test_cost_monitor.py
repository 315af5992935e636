"""Where learned costs start, what follows them, and how they outlive a server."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from adaserve.config import AdaServeConfig
from adaserve.engine.costs import cost_cache, other_processes
from adaserve.engine.costs.baseline import Baseline
from adaserve.engine.costs.cost_monitor import FIRST_LOOK, KNOWN_S, LOOK_EVERY_S, SHARED_LOOKS, CostMonitor
from adaserve.engine.costs.measure import Grid
from adaserve.engine.costs.other_processes import OtherProcesses
from adaserve.host import cpu_times
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel, TabulatedCost
from adaserve.scheduler.costs.learned import LearnedCosts, known_sizes
from adaserve.scheduler.costs.profile import Profile
from adaserve.scheduler.interface import Context
from adaserve.slo.classes import SLOConfig
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.stats import SLOStats

META = {"host": "here", "target": "pair", "device": "cpu"}
TABLE = TabulatedCost((1.0, 4.0, 8.0, 16.0, 32.0), (0.010, 0.011, 0.013, 0.012, 0.020))
QUIET = LatencyModel(ForwardCost(2e-4), TABLE, 1e-3)
KEPT = replace(QUIET, verify=replace(TABLE, known=TABLE.tokens))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def slower(times: float, model: LatencyModel = QUIET) -> LatencyModel:
    table = replace(TABLE, seconds_at=tuple(times * s for s in TABLE.seconds_at))
    return replace(model, verify=table)


def profile(times: float, **meta: str) -> Profile:
    """What a measurement of a host that is that many times slower gives."""
    points = np.array([[t, 256.0, 1, times * s] for t, s in zip(TABLE.tokens, TABLE.seconds_at, strict=True)])
    return Profile(draft=points * [1, 1, 1, 0.02], verify=points, overhead_s=1e-3, meta=meta or META)


def start(times: float, config: AdaServeConfig | None = None) -> LatencyModel:
    """The start of a server whose measurement comes out that many times slower."""
    return cost_cache.start_model(config or AdaServeConfig(), META, lambda: profile(times))


def one_token_ms(model: LatencyModel) -> float:
    return model.verify_s(1.0, Context(256.0)) * 1e3


class Server:
    """The part of a worker that is tested, with a clock of its own."""

    def __init__(
        self, model: LatencyModel, fixed: bool = False, saves: bool = True, others: float = 0.0, **meta: str
    ) -> None:
        """``others``: share of the processors that other processes use."""
        self.costs = LearnedCosts(model)
        self.ledger = SLOLedger(self.costs.baseline_s(), SLOStats(SLOConfig(), None))
        self.baseline = Baseline(self.costs, self.ledger, fixed)
        self.host = CostMonitor(self.costs, self.baseline, META | meta, saves=saves)
        self.host._others = SimpleNamespace(share=lambda: others)
        self.now_s = 100.0

    def serve(
        self, iterations: int, times: float = 1.0, sizes: tuple[int, ...] = (1, 4, 8, 16), requests: int = 1
    ) -> None:
        """Forwards of such sizes that take that many times what they do on the quiet host."""
        for i in range(iterations):
            size = sizes[i // 3 % len(sizes)]
            context = Context(256.0)
            self.costs.verify.observe(size, context, times * QUIET.verify_s(float(size), context))
            self.now_s += LOOK_EVERY_S / 10
            self.host.observed(self.now_s, requests)

    def report(self, idle_s: float = 0.0) -> dict[str, Any]:
        return self.host.report(self.now_s + idle_s)


def test_without_anything_kept_the_measurement_is_the_start() -> None:
    assert one_token_ms(start(1.0)) == pytest.approx(10.0, rel=0.05)


def test_costs_that_fall_with_tokens_are_measured_as_they_are() -> None:
    model = start(1.0)
    assert model.verify_s(16.0) < model.verify_s(8.0)


def test_what_was_learned_is_the_start_of_the_next_server() -> None:
    first = Server(start(3.0))
    first.serve(400)
    again = start(1.0)
    assert known_sizes(again.verify) and one_token_ms(again) == pytest.approx(10.0, rel=0.05)


def kept_at(config: AdaServeConfig, target: str = "target") -> Path:
    args = SimpleNamespace(**dict.fromkeys(cost_cache._OF_SERVER), model_path=target)
    return cost_cache.learned_path(cost_cache.cache_key((), config, args))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_costs_of_one_model_are_not_those_of_another_of_its_name(name: str, tmp_path: Path) -> None:
    """Else the larger one would seem to run on a busy host."""
    kept = set()
    for size in (100, 200):
        folder = tmp_path / str(size) / "model"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(bytes(size))
        kept.add(kept_at(AdaServeConfig(), str(folder)))
    assert len(kept) == 2


def test_costs_of_one_attention_kernel_are_not_those_of_another() -> None:
    """Else the slower one would seem to run on a busy host."""
    auto, triton, flashinfer = (
        kept_at(AdaServeConfig(attention=kernel)) for kernel in ("auto", "triton", "flashinfer")
    )
    assert auto == triton != flashinfer


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_costs_of_cpu_kernels_are_not_those_of_a_server_without(
    on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that one would seem to run on a busy host for as long as it serves."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_a_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    kept: list[Path] = []
    for kernels in (object(), None):
        monkeypatch.setattr(cost_cache, "load_kernels", lambda kernels=kernels: kernels)
        kept.append(kept_at(AdaServeConfig()))
    assert (kept[0] == kept[1]) == on_a_gpu


def test_a_busy_start_trusts_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    cost_cache.save_learned(META, KEPT)
    with caplog.at_level(logging.WARNING):
        assert one_token_ms(start(6.0)) == pytest.approx(10.0)
    assert "6.0 times as long as when their costs were saved" in caplog.text


def test_a_start_beside_other_programs_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for share in (0.1, 0.5):
        others = SimpleNamespace(share=lambda share=share: share)
        monkeypatch.setattr(cost_cache, "OtherProcesses", lambda others=others: others)
        start(1.0)
    assert [r.getMessage().partition(" of this")[0] for r in caplog.records] == [
        "AdaServe: other processes used 50%"
    ]


def test_what_is_kept_can_be_read_by_servers_of_other_users() -> None:
    cost_cache.save_learned(META, KEPT)
    assert cost_cache.learned_path(META).stat().st_mode & 0o777 == 0o644


def test_a_host_that_became_faster_is_measured_anew() -> None:
    cost_cache.save_learned(META, slower(4.0, KEPT))
    assert one_token_ms(start(1.0)) == pytest.approx(10.0, rel=0.05)


def test_a_profile_that_is_asked_for_is_the_start(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is kept; it says so when the profile was made elsewhere."""
    cost_cache.save_learned(META, KEPT)
    profile(3.0, host="elsewhere").save(cache / "p.json")
    with caplog.at_level(logging.WARNING):
        model = start(1.0, AdaServeConfig(profile=str(cache / "p.json")))
    assert not known_sizes(model.verify) and one_token_ms(model) == pytest.approx(30.0, rel=0.05)
    assert "made with another host, target" in caplog.text


def test_a_full_profile_replaces_what_was_learned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cost_cache.save_learned(META, KEPT)
    monkeypatch.setenv(cost_cache.PROFILE_ENV, json.dumps({"ticks": "/dev/null", "out": None}))
    cost_cache.save_full_profile(META, lambda grid, tick: profile(1.0), saves=True)
    assert cost_cache.load_learned(cost_cache.learned_path(META)) is None


def test_of_several_ranks_one_writes_the_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them measure, as they run the same forwards."""
    files = {"ticks": str(tmp_path / "ticks"), "out": str(tmp_path / "p.json")}
    monkeypatch.setenv(cost_cache.PROFILE_ENV, json.dumps(files))

    def run(grid: Grid, tick: Callable[[str], None]) -> Profile:
        tick("a point")
        return profile(1.0)

    assert cost_cache.save_full_profile(META, run, saves=False) is None and not list(tmp_path.iterdir())
    assert cost_cache.save_full_profile(META, run, saves=True) == tmp_path / "p.json"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"latency": {}}',
        '{"latency": {"verify": 3, "draft": []}}',
        "[]",
        '{"latency": []}',
        '{"latency": {"draft": {"fixed_s": 1}, "verify": {"fixed_s": 1}, "draft_first": []}}',
        '{"latency": {"draft": {"fixed_s": 1}, "verify": {"fixed_s": 1}, "overhead_s": 1' + "0" * 400 + "}}",
        '{"latency": {"draft": {"fixed_s": 1}, "verify": {"fixed_s": 0}}}',
        "[" * 5_000,
        *(
            '{"latency": {"draft": {"fixed_s": 1}, "verify": {"form": "table", "tokens": [1], '
            f'"seconds_at": [{seconds}]}}}}}}'
            for seconds in ("NaN", "0", "-1", '"a"', "null", "1e999")
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_file_is_no_obstacle(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = cost_cache.learned_path(META)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cost_cache.load_learned(path) is None
    assert "costs are learned from scratch" in caplog.text
    assert one_token_ms(start(1.0)) == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"overhead_s": "x"}', b'{"verify_points": [{}]}'])
def test_a_damaged_profile_is_no_obstacle(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = cost_cache.profile_path(META)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert one_token_ms(start(1.0)) == pytest.approx(10.0, rel=0.05)
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("times", [0.25, 5.0])
def test_the_baseline_follows_what_is_learned(times: float, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(slower(times))
    with caplog.at_level(logging.INFO):
        server.serve(FIRST_LOOK - 1)
        assert server.ledger.baseline_s == pytest.approx(0.010 * times + 1e-3, rel=0.05), "too early"
        server.serve(300)
    assert server.ledger.baseline_s == pytest.approx(0.011, rel=0.05)
    assert "instead of" in caplog.text
    assert server.report()["baseline_start_ms"] == pytest.approx(10 * times + 1, rel=0.05)


def test_the_baseline_does_not_rise_with_the_load() -> None:
    """Forwards of many requests take a quarter longer than their sizes say: others use the memory, too."""
    server = Server(QUIET)
    server.serve(200)
    before = server.ledger.baseline_s
    server.serve(6000, times=1.25, sizes=(16, 20, 24), requests=16)
    assert server.costs.baseline_s() > 1.05 * before, "what it is worked out from did rise"
    assert server.ledger.baseline_s == before
    server.serve(400, times=1.25)
    assert server.ledger.baseline_s == pytest.approx(0.0135, rel=0.05), "a lone request takes longer, too"


def test_the_baseline_does_not_rise_while_the_host_is_busy() -> None:
    """Sizes that are seldom served are learned from slow times, and the baseline leans on them."""
    server = Server(QUIET, saves=False)
    server.serve(200)
    before = server.ledger.baseline_s
    costs = SimpleNamespace(slowdown=1.0, baseline_s=lambda: 1.5 * before)
    server.host._costs = server.baseline._costs = costs
    for costs.slowdown, expected in ((3.0, before), (1.0, 1.5 * before)):
        for _ in range(20):
            server.now_s += LOOK_EVERY_S
            server.host.observed(server.now_s, 1)
        assert server.ledger.baseline_s == expected


@pytest.mark.parametrize(
    ("others", "device", "stays"), [(0.1, "cpu", False), (0.5, "cpu", True), (0.5, "a GPU", False)]
)
def test_sizes_that_are_new_beside_other_processes_do_not_raise_the_baseline(
    others: float, device: str, stays: bool
) -> None:
    """Nor are they kept: there is no known size that would say how slow they are. A GPU times itself."""
    server = Server(QUIET, others=others, device=device)
    server.serve(400, times=3.0)
    assert server.report()["slowdown"] == pytest.approx(1.0, abs=0.1)
    assert server.ledger.baseline_s == pytest.approx(0.011 if stays else 0.031, rel=0.05)
    assert any(cost_cache.learned_path(META).parent.glob("*")) != stays
    server.serve(10 * SHARED_LOOKS, times=3.0)
    assert server.ledger.baseline_s == pytest.approx(0.031, rel=0.05), "the host is like that"


def test_a_server_that_met_load_alone_leaves_the_baseline_to_the_next() -> None:
    server = Server(QUIET)
    server.serve(400, sizes=(16, 24, 32), requests=16)
    again = start(1.0)
    assert known_sizes(again.verify) and one_token_ms(again) == pytest.approx(10.0, rel=0.05)


def test_a_fixed_baseline_stays() -> None:
    server = Server(slower(5.0), fixed=True)
    before = server.ledger.baseline_s
    server.serve(400)
    assert server.ledger.baseline_s == before and server.report()["baseline_fixed"]


def test_a_baseline_that_is_fixed_while_it_serves_stays() -> None:
    server = Server(slower(5.0))
    server.serve(100)
    server.baseline.fix(0.02)
    server.serve(400)
    assert server.ledger.baseline_s == 0.02 and server.report()["baseline_fixed"]
    assert not [note for note in server.report()["notes"] if "the baseline is" in note]


def test_a_busy_host_is_said_and_changes_neither_baseline_nor_file(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(QUIET)
    server.serve(400)
    quiet_s, path = server.ledger.baseline_s, cost_cache.learned_path(META)
    kept = path.read_text()
    with caplog.at_level(logging.INFO):
        server.serve(400, times=6.0)
        report = server.report()
        assert report["busy"] and report["slowdown"] == pytest.approx(6.0, rel=0.05)
        assert [note.split(":")[0] for note in report["notes"]] == ["the host is busy"]
        assert not server.report(idle_s=KNOWN_S)["notes"], "whether it still is nobody knows"
        assert server.ledger.baseline_s == quiet_s and path.read_text() == kept
        server.serve(20)
        assert not server.report()["notes"]
        server.serve(20, times=6.0)
        assert server.report()["notes"]
        server.serve(60)
    assert not server.report()["busy"] and not server.report()["notes"]
    assert caplog.text.count("the host is busy") == caplog.text.count("quiet again") == 1


def test_only_the_deciding_rank_saves() -> None:
    Server(QUIET, saves=False).serve(400)
    assert not cost_cache.learned_path(META).exists()


def test_what_others_use_is_a_share() -> None:
    others = OtherProcesses()
    sum(i * i for i in range(2_000_000))
    assert 0.0 <= others.share() <= 1.0


class Process:
    """A process that uses a second of a core whenever somebody looks, until it ends."""

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds, self.ended = pid, seconds, False

    def cpu_times(self) -> SimpleNamespace:
        if self.ended:
            raise psutil.NoSuchProcess(self.pid)
        self.seconds += 1.0
        return SimpleNamespace(user=self.seconds, system=0.0)


def test_processes_that_come_and_go_are_no_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are all processes of the host read at every look."""
    now_s, worked_s, server, looks = 0.0, 0.0, [Process(1, 100.0), Process(2, 500.0)], 0

    def family() -> list[Process]:
        nonlocal looks
        looks += 1
        return list(server)

    def cores(percpu: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(user=worked_s)]

    monkeypatch.setattr(cpu_times, "_own_processors", lambda: {0})
    monkeypatch.setattr(cpu_times, "least_quota", lambda: None)
    monkeypatch.setattr(other_processes, "_server", family)
    monkeypatch.setattr(other_processes.psutil, "cpu_times", cores)
    monkeypatch.setattr(other_processes.time, "perf_counter", lambda: now_s)
    others, shares = OtherProcesses(), []
    for look in range(1, 41):
        now_s, worked_s = 4.0 * look, 3.0 * look  # three of four seconds, two of them by the server
        if look == 5:
            server[1].ended = True
        if look == 10:
            server.append(Process(3, 900.0))
        shares.append(others.share())
    assert looks == 1 + 160 // 60
    assert set(shares) == {0.25, 0.5}, "what one second of one of them is"


def test_a_full_disk_keeps_what_was_kept_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost_cache.save_learned(META, KEPT)
    folder = cost_cache.learned_path(META).parent
    before = {p.name: p.read_text() for p in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(cost_cache.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        cost_cache.save_learned(META, slower(2.0, KEPT))
    assert {p.name: p.read_text() for p in folder.iterdir()} == before


def test_a_host_that_loses_cores_or_tells_nothing_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_times, "_own_processors", lambda: {0, 3})
    monkeypatch.setattr(cpu_times, "least_quota", lambda: None)
    monkeypatch.setattr(other_processes, "_server", list)
    told = [SimpleNamespace(user=10.0)]
    monkeypatch.setattr(other_processes.psutil, "cpu_times", lambda percpu: told)
    others = OtherProcesses()
    assert others.share() == 0.0

    def nothing(percpu: bool) -> None:
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(other_processes.psutil, "cpu_times", nothing)
    assert others.share() == 0.0


def test_a_cache_that_cannot_be_written_does_not_end_the_server(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    server = Server(QUIET)
    with caplog.at_level(logging.WARNING):
        server.serve(400)
    assert caplog.text.count("can't be kept for the next start") == 1, "said once"

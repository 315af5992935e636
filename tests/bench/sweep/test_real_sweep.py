"""Whole sweeps of seconds on real servers: two policies, a server that dies, SGLang without speculation."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from adaserve.bench.sweep.commands import Options, sweep
from adaserve.bench.sweep.measure import Traffic
from adaserve.bench.sweep.servers import IDLE_ROUNDS
from adaserve.bench.sweep.store import Store
from adaserve.bench.sweep.systems import STOCK
from tests.engine.pairs import save_pair


class Killer(threading.Thread):
    """Kills the servers once, while the first case is under way."""

    def __init__(self, store: Store) -> None:
        super().__init__(daemon=True)
        self.store, self.killed = store, 0

    def run(self) -> None:
        requests = self.store.work / "case" / "requests.jsonl"
        while not (requests.exists() and requests.stat().st_size):
            time.sleep(0.02)
        for child in psutil.Process().children():
            if "sglang.launch_server" in " ".join(child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    process.kill()
                self.killed += 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host Locust alone may take longer to start than a case of three seconds may last."""
    monkeypatch.setattr(Traffic, "limit_s", property(lambda _: 600.0))


def options(pair: Path, out: Path, **given: Any) -> Options:
    plan = {
        "axes": ("load",),
        "policies": ("none", "chain-2"),
        "loads": (0.3,),
        "seeds": (0,),
        "seconds": 3.0,
    }
    return Options(
        given={**plan, "prompt_scale": 0.06, "output_scale": 0.06, "max_tokens": 64, **given},
        server={
            "model": str(pair / "target"),
            "draft": str(pair / "noisy"),
            "extra": ["--max-total-tokens", "8192"],  # a model this small would get millions of KV slots
        },
        baseline_ms=5.0,  # a busy client reads many of a small model's tokens at once, and would find 0.02
        capacity_rps=20.0,
        attempts=1,
        out=out,
    )


def check_cases(store: Store, policies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Every case ran to its end on the same 18 requests; returns them by policy."""
    cases = store.finished()
    assert set(cases) == {f"load0.30.{p}.s0.b0" for p in policies}
    assert len({c["trace_sha256"] for c in cases.values()}) == 1, "all had the same requests"
    for case in cases.values():
        assert case["status"] == "ok" and case["all"]["requests"] == case["all"]["completed"] == 18
        assert len(store.records(case["id"])) == 18
    return {c["policy"]: c for c in cases.values()}


def swept(store: Store, given: Options) -> bool:
    """Whether every block was measured. Where not, the test shows what was said, and how servers ended."""
    done = sweep(given, Console())
    for log in [] if done else sorted(store.work.rglob("*.log")):
        print(f"-- the end of {log.name}", *log.read_text().splitlines()[-25:], sep="\n")
    return done


def lengths(store: Store) -> list[int]:
    """Tokens of the planned answers."""
    (schedule,) = (store.work / "schedules").iterdir()
    rows = [json.loads(line) for line in schedule.read_text().splitlines()]
    return [row["output_length"] for row in rows]


@pytest.mark.slow
def test_two_policies_on_one_server(pair: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    assert swept(store, options(pair, store.folder, check_plain=False))
    cases = check_cases(store, ("none", "chain-2"))
    none, chain = cases["none"]["server"], cases["chain-2"]["server"]
    assert none["tokens_per_verification"] == 1.0 and none["tree_nodes"] == 0.0
    assert 1.0 < chain["tokens_per_verification"] <= 3.0
    assert 0.5 < chain["tree_nodes"] <= 2.0
    for case in cases.values():
        server = case["server"]
        assert server["iterations"] > 0
        assert server["seconds"]["verify"] > 0 and server["seconds"]["prefill"] > 0
        # Every token but each request's first comes out of a verification. One of a chain can pass the end of
        # an answer, which the server does not know.
        verified = server["tokens_per_verification"] * server["running"] * server["iterations"]
        sent = case["all"]["total_output_tokens"] - case["all"]["requests"]
        passed = 0 if case["policy"] == "none" else 2 * case["all"]["requests"]
        assert sent - 1 <= verified <= sent + passed + 1
        assert [r.output_tokens for r in store.records(case["id"])] == lengths(store)
    assert (store.folder / "attainment-load.png").exists()

    before = (store.folder / "cases.jsonl").read_bytes()
    assert swept(store, Options({}, out=store.folder)), "nothing is left"
    assert (store.folder / "cases.jsonl").read_bytes() == before
    assert len(list(store.work.glob("server-*.log"))) == 1, "no server was started for nothing"


@pytest.mark.slow
def test_a_sweep_outlives_its_server_and_is_compared_with_stock_sglang(pair: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    killer = Killer(store)
    killer.start()
    assert swept(store, options(pair, store.folder)), "every case ran in the end"
    assert killer.killed == 2, "ours, and SGLang without speculation"
    lines = [line for line in (store.folder / "cases.jsonl").read_text().splitlines() if line]
    assert len(lines) == 4 and sum('"status": "failed"' in line for line in lines) == 1
    cases = check_cases(store, ("none", "chain-2", STOCK))
    assert cases[STOCK]["server"] is None, "no AdaServe in there"
    rounds = store.head()["idle_rounds"]
    assert set(rounds) == {"none", STOCK}
    assert all(len(v) == IDLE_ROUNDS and min(v) > 0 for r in rounds.values() for v in r.values())
    assert "without speculation" in (store.folder / "README.md").read_text()
    assert len(list(store.work.rglob("server-*.log"))) == 4, "two starts, and two after their deaths"

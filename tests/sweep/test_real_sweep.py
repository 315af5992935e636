"""A whole sweep of seconds on real servers: two policies, a server that dies, SGLang without speculation."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from adaserve.sweep.commands import Options, sweep
from adaserve.sweep.plan import STOCK
from adaserve.sweep.store import Store
from tests.engine.pairs import save_pair


class Killer(threading.Thread):
    """Kills the server once, while its first case is under way."""

    def __init__(self, store: Store) -> None:
        super().__init__(daemon=True)
        self.store, self.killed = store, 0

    def run(self) -> None:
        requests = self.store.work / "case" / "requests.jsonl"
        while not (requests.exists() and requests.stat().st_size):
            time.sleep(0.02)
        for child in psutil.Process().children(recursive=True):
            if "sglang.launch_server" in " ".join(child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    process.kill()
                self.killed += 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


def options(pair: Path, out: Path) -> Options:
    return Options(
        given={
            "axes": ("load",), "policies": ("none", "chain-2"), "loads": (0.3,), "seconds": 3.0,
            "length_scale": 0.06,
        },
        server={"model": str(pair / "target"), "draft": str(pair / "noisy")},
        capacity_rps=20.0,
        out=out,
    )  # fmt: skip


def test_a_sweep_outlives_its_server_and_is_not_repeated(pair: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    killer = Killer(store)
    killer.start()
    assert sweep(options(pair, store.folder), Console(quiet=True)), "every case ran in the end"
    assert killer.killed == 1

    lines = [line for line in (store.folder / "cases.jsonl").read_text().splitlines() if line]
    cases = store.finished()
    assert set(cases) == {f"load0.30.{p}.s0" for p in ("none", "chain-2", STOCK)}
    assert len(lines) == 4 and sum('"status": "failed"' in line for line in lines) == 1

    assert len({c["trace_sha256"] for c in cases.values()}) == 1, "all had the same requests"
    for case in cases.values():
        assert case["status"] == "ok" and case["all"]["requests"] == case["all"]["completed"] == 18
        assert len(store.records(case["id"])) == 18
    none, chain, stock = (cases[f"load0.30.{p}.s0"] for p in ("none", "chain-2", STOCK))
    assert stock["server"] is None
    assert none["server"]["tokens_per_verification"] == 1.0 and none["server"]["tree_nodes"] == 0.0
    assert 1.0 < chain["server"]["tokens_per_verification"] <= 3.0
    assert 0.5 < chain["server"]["tree_nodes"] <= 2.0
    for case in (none, chain):
        server = case["server"]
        assert server["counted_iterations"] == server["iterations"] > 0
        # Every token but each request's first comes out of a verification.
        verified = server["tokens_per_verification"] * server["running"] * server["iterations"]
        assert verified == pytest.approx(case["all"]["total_output_tokens"] - 18, abs=1)
    assert {"none", STOCK} == set(store.head()["check"])
    page = (store.folder / "README.md").read_text()
    assert "without speculation" in page and (store.folder / "attainment-load.png").exists()

    before = (store.folder / "cases.jsonl").read_bytes()
    start_s = time.monotonic()
    assert sweep(Options({}, out=store.folder), Console(quiet=True))
    assert (store.folder / "cases.jsonl").read_bytes() == before
    assert "server-4" not in " ".join(p.name for p in store.work.iterdir()), (
        "no server was started for nothing"
    )
    assert time.monotonic() - start_s < 60

"""SGLang's load snapshots with a section of ours, through SGLang's own writer and reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader, ShmLoadSnapshotWriter

from adaserve.patches.scheduler.load_reports import SLOLoadSnapshot, _publish
from adaserve.slo.classes import SLOConfig
from adaserve.slo.events import IterationSample
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.stats import PUBLISHED_AT_ONCE, SLOStats

SLO = {"admission_open": 1.0, "classes": {"chat": {"tpot_ms": 9.5, "headroom": 2.0, "wait_ms": 0.0}}}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(load_snapshot, "snapshot_decoder", msgspec.msgpack.Decoder(SLOLoadSnapshot))
    yield


def through_memory(tmp_path: Path, snapshot: LoadSnapshot) -> LoadSnapshot:
    path = str(tmp_path / "loads.shm")
    writer = ShmLoadSnapshotWriter(path, dp_size=1, dp_rank=0)
    writer.write(snapshot)
    (read,) = ShmLoadSnapshotReader(path, dp_size=1).read_all()
    writer.close()
    return read


def test_the_section_arrives_where_it_is_asked_for(tmp_path: Path, ours: None) -> None:
    read = through_memory(tmp_path, SLOLoadSnapshot(num_running_reqs=3, slo=SLO))
    for include in (None, {"all"}, {"slo"}, {"core", "slo"}):
        told = read.to_dict(include)
        assert told["slo"] == SLO and told["num_running_reqs"] == 3
    for include in ({"core"}, {"queues"}):
        assert "slo" not in read.to_dict(include)
    with pytest.raises(ValueError, match="slow"):
        read.to_dict({"slow"})


def test_snapshots_of_other_servers_are_read_as_before(tmp_path: Path, ours: None) -> None:
    plain = LoadSnapshot(num_running_reqs=3, decode_moments=[1.0])
    assert through_memory(tmp_path, plain).to_dict() == plain.to_dict()


def test_an_idle_server_holds_no_prompt_back() -> None:
    """The one that the last iteration held back may have ended in its prefill: no iteration followed."""
    registry = prometheus_client.CollectorRegistry()
    stats = SLOStats(SLOConfig(), ServerMetrics("m", registry))
    ledger = SLOLedger(0.02, stats)
    forecaster = SimpleNamespace(is_due=lambda *_: True, renew=lambda *_: None)
    worker = SimpleNamespace(
        ledger=ledger,
        forecaster=forecaster,
        prefill=SimpleNamespace(paces=lambda _: True),
        policies=SimpleNamespace(current=SimpleNamespace(name="priced")),
    )
    scheduler = SimpleNamespace(
        draft_worker=worker, running_batch=SimpleNamespace(reqs=[]),
        waiting_queue=[], chunked_req=None, load_snapshot_writer=object(), max_running_requests=4,
        chunked_prefill_size=256,
    )  # fmt: skip

    def held(waiting: list[Any]) -> list[float | None]:
        scheduler.waiting_queue = waiting
        _publish(lambda *_: None, scheduler)
        labels = {"model_name": "m", "slo_class": "chat"}
        names = ("adaserve:gated_prompts", "adaserve:gated_longest_seconds")
        return [registry.get_sample_value(name, labels) for name in names]

    for _ in range(PUBLISHED_AT_ONCE):
        ledger.gate([("chat", 2.5)])
        ledger.iteration(["r"], IterationSample(1, 0, 0, 1, 1, 0, 1, 1.0, 0.0, 0.0, 0.01, 0.01))
    assert held([SimpleNamespace(finished=lambda: False)]) == [1, 2.5]
    assert held([]) == [0, 0]

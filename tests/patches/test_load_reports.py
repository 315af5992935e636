"""SGLang's load snapshots with a section of ours, through SGLang's own writer and reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader, ShmLoadSnapshotWriter

from adaserve.patches.load_reports import SLOLoadSnapshot

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

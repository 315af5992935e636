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

from adaserve.patches.scheduler.load_reports import SLOLoadSnapshot, _arrived, _publish
from adaserve.slo.classes import SLOConfig
from adaserve.slo.events import IterationSample
from adaserve.slo.ledger import HEALTH_CHECK, SLOLedger
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


def scheduler_of(forecaster: Any, ledger: Any, **state: Any) -> Any:
    """SGLang's, idle but for ``state``."""
    worker = SimpleNamespace(
        ledger=ledger,
        forecaster=forecaster,
        prefill=SimpleNamespace(paces=lambda _: True, most_beside=lambda _: 0),
        policies=SimpleNamespace(current=SimpleNamespace(name="priced")),
    )
    idle = {
        "draft_worker": worker, "running_batch": SimpleNamespace(reqs=[]), "waiting_queue": [],
        "chunked_req": None, "load_snapshot_writer": object(), "max_running_requests": 4,
        "chunked_prefill_size": 256,
    }  # fmt: skip
    return SimpleNamespace(**idle | state)


REQUEST = SimpleNamespace(finished=lambda: False)
STATES: list[dict[str, Any]] = [
    {},
    {"running_batch": SimpleNamespace(reqs=[REQUEST])},
    {"waiting_queue": [REQUEST]},
    {"chunked_req": REQUEST},
]


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_a_new_forecast_is_published_at_once(state: dict[str, Any], due: bool) -> None:
    asked, renewed, emptied = list[bool](), list[Any](), list[bool]()
    forecaster = SimpleNamespace(
        is_due=lambda idle, _: asked.append(idle) or due, renew=lambda load, _: renewed.append(load)
    )
    ledger = SimpleNamespace(stats=SimpleNamespace(nothing_held=lambda: emptied.append(True)))
    publish = lambda _, force: force  # noqa: E731
    assert _publish(publish, scheduler_of(forecaster, ledger, **state)) is due
    assert asked == [not state] and len(renewed) == due and bool(emptied) == (due and not state)
    other_rank = scheduler_of(forecaster, ledger, load_snapshot_writer=None)
    assert not _publish(publish, other_rank) and len(asked) == 1


@pytest.mark.parametrize(
    ("refused", "rid", "output_ids", "counts"),
    [
        (False, "r", [], True),
        (True, "r", [], False),
        (False, "r", [7], False),  # it comes back to be prefilled again
        (False, f"{HEALTH_CHECK}_1", [], False),
    ],
)
def test_what_clients_send_arrives_once(refused: bool, rid: str, output_ids: list[int], counts: bool) -> None:
    arrived: list[Any] = []
    forecaster = SimpleNamespace(arrived=lambda req, load: arrived.append(req))
    req = SimpleNamespace(rid=rid, output_ids=output_ids)
    _arrived(refused, scheduler_of(forecaster, None), req)
    assert arrived == [req] * counts


def test_an_idle_server_holds_no_prompt_back() -> None:
    """The one that the last iteration held back may have ended in its prefill: no iteration followed."""
    registry = prometheus_client.CollectorRegistry()
    stats = SLOStats(SLOConfig(), ServerMetrics("m", registry))
    ledger = SLOLedger(0.02, stats)
    forecaster = SimpleNamespace(is_due=lambda *_: True, renew=lambda *_: None)
    scheduler = scheduler_of(forecaster, ledger)

    def held(waiting: list[Any]) -> list[float | None]:
        scheduler.waiting_queue = waiting
        _publish(lambda *_: None, scheduler)
        labels = {"model_name": "m", "slo_class": "chat"}
        names = ("adaserve:gated_prompts", "adaserve:gated_longest_seconds")
        return [registry.get_sample_value(name, labels) for name in names]

    for _ in range(PUBLISHED_AT_ONCE):
        ledger.gate([("chat", 2.5)])
        ledger.iteration(["r"], IterationSample(1, 0, 0, 1, 1, 0, 1, 1.0, 0.0, 0.0, 0.01, 0.01))
    assert held([REQUEST]) == [1, 2.5]
    assert held([]) == [0, 0]

"""Keys and values in 8 bits: the text is that of SGLang with such a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import POLICIES, TIGHT, TREES, Served, adaserve_server
from tests.engine.harness import Server, Zygote, run_jobs, whole_texts, workload

FLAGS = {"kv-cache-dtype": "fp8_e4m3"}
OFF = {"cpu_weights": "off"}
JOBS = workload(60, seed=17)


@pytest.fixture(scope="module")
def expected(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What SGLang without speculation says."""
    environment = {"ADASERVE_CONFIG": json.dumps(OFF)}
    server = Server(tmp_path_factory.mktemp("stock8"), pair / "target", FLAGS, environment)
    with server.running(zygote):
        return whole_texts(server, JOBS)


@pytest.fixture(scope="module", params=["cpu", "device"])
def in_eight_bits(
    request: pytest.FixtureRequest, zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """By SGLang's forward, as our kernels on a CPU read no such cache; and as on GPUs."""
    way = str(request.param)
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(f"{way}8"), pair, "noisy", {**TREES, **OFF},
        {"rotate": POLICIES, "retract_every": 40, "audit_every": 1 << 30},
        overlap=way == "device", **{**TIGHT, **FLAGS},
    )  # fmt: skip
    if way == "device":
        server.environment[DEVICE_PATH_ENV] = "1"
    with server.running(zygote):
        yield Served(way, server, probe)
        server.assert_idle_and_clean()


def test_greedy_is_the_target_alone(in_eight_bits: Served, expected: list[list[int]], stock: Server) -> None:
    said = [a["output_ids"] for a in run_jobs(in_eight_bits.server, JOBS, speed=2) if a is not None]
    assert said == expected
    stats = in_eight_bits.probe.read()
    assert 1.05 < 1 + stats["accepted"] / stats["rows"] < 5, "the draft agrees too rarely or too often"
    others = whole_texts(stock, JOBS)
    assert sum(a != b for a, b in zip(said, others, strict=True)) > 20, "the cache is not in 8 bits"

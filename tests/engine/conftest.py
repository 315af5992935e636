"""Servers that the engine tests share: stock SGLang, and AdaServe in both scheduler modes.

Starting one takes a good part of a minute on two cores, so each is started once and tests are grouped
by server. Two never run at the same time for longer than a test needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Probe, Server
from tests.engine.pairs import save_pair

POLICIES = [
    "adaserve", "priced", "none", "chain-2", "fixed-tree", "equal-greedy", "global-greedy", "adaserve-v1",
    "turbospec", "chain-4",
]  # fmt: skip


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


def adaserve_server(
    folder: Path,
    pair: Path,
    draft: str,
    config: dict[str, Any],
    probe: dict[str, Any] | None = None,
    overlap: bool = False,
    **arguments: Any,
) -> tuple[Server, Probe]:
    """An AdaServe server, not started yet, and the probe inside it."""
    watch = Probe(folder, {"audit_every": 9, **(probe or {})})
    environment = {
        **watch.environment(),
        "ADASERVE_CONFIG": json.dumps(config),
        "ADASERVE_CPU_OVERLAP": "1" if overlap else "0",
    }
    flags = {"speculative-algorithm": "ADASERVE", "speculative-draft-model-path": pair / draft, **arguments}
    return Server(folder, pair / "target", flags, environment), watch


@pytest.fixture(scope="session")
def stock(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang without speculation on the same platform: what every output is compared with."""
    with Server(tmp_path_factory.mktemp("stock"), pair / "target", {}) as server:
        yield server

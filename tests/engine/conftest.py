"""Servers that the engine tests share: stock SGLang, and AdaServe in both scheduler modes.

Starting one takes a good part of a minute on two cores, so each is started once and tests are grouped
by server. Two never run at the same time for longer than a test needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Probe, Server, Zygote
from tests.engine.heads import save_headed_pair, save_qwen3_pair
from tests.engine.mtp import save_with_layer
from tests.engine.pairs import save_pair
from tests.own_cache import own_cache

POLICIES = [
    "adaserve", "priced", "none", "chain-2", "fixed-tree", "equal-greedy", "global-greedy", "adaserve-v1",
    "turbospec", "chain-4",
]  # fmt: skip

TREES = {"policy": "adaserve", "max_depth": 4, "max_width": 3, "budget": 40}

RESTLESS = {"rotate": POLICIES, "hold_back": True, "retract_every": 40}
"""What the probe does on most servers: another policy in each iteration, some requests without trees, and
some that are taken back."""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


EXACT_DRAFT = {"draft_weights": "fp32"}
"""Where a draft's cache is compared with a forward of its own. In 8 bits, sums that differ by a rounding may
make keys that differ by a step."""


def adaserve_server(
    folder: Path,
    pair: Path,
    draft: str | None,
    config: dict[str, Any],
    probe: dict[str, Any] | None = None,
    *,
    overlap: bool = False,
    **arguments: Any,
) -> tuple[Server, Probe]:
    """An AdaServe server, not started yet, and the probe inside it."""
    watch = Probe(folder, {"audit_every": 9, **(probe or {})})
    environment = {
        **watch.environment(),
        "XDG_CACHE_HOME": own_cache(folder / "cache"),
        "ADASERVE_CONFIG": json.dumps(config),
        "ADASERVE_CPU_OVERLAP": "1" if overlap else "0",
        # SGLang counts its KV slots after every iteration, and stops the scheduler when one is missing.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        # After a retraction SGLang admits cautiously for hundreds of iterations; here for a few.
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
    }
    flags: dict[str, Any] = {"speculative-algorithm": "ADASERVE", **arguments}
    if draft is not None:
        flags["speculative-draft-model-path"] = pair / draft
    return Server(folder, pair / "target", flags, environment), watch


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


@pytest.fixture(scope="session")
def stock(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang without speculation on the same platform: what every output is compared with."""
    with Server(tmp_path_factory.mktemp("stock"), pair / "target", {}).running(zygote) as server:
        yield server


ALONE = {"drafts": "self", "draft_window": 64}
"""No draft model."""

TIGHT = {"max-total-tokens": 420, "max-running-requests": 24, "schedule-conservativeness": 0.1}
"""A KV pool that holds a handful of requests, admitted with far too much optimism.

Whether it runs full depends on who meets whom, so tests that need retractions also ask the probe for
some (``retract_every``).
"""


@dataclass(frozen=True)
class Served:
    """An AdaServe server that runs, what it is, and the probe inside it."""

    name: str
    server: Server
    probe: Probe


def audited(zygote: Zygote, name: str, server: Server, probe: Probe) -> Iterator[Served]:
    """While it runs. At the end nobody holds anything, and caches have held what the engine believed.

    Where there is no draft, or no head, nothing of it was audited, which counts as no error."""
    with server.running(zygote):
        yield Served(name, server, probe)
        server.assert_idle_and_clean()
        stats = probe.read()
        assert stats["wrong_lengths"] == []
        assert stats["target_kv_error"] < 1e-4, "the target's cache holds something else than its tokens"
        assert stats["draft_kv_error"] < 1e-4, "the draft's cache holds something else than its tokens"
        assert stats["hidden_error"] < 1e-4, "the head reads hidden states of other tokens"


@pytest.fixture(scope="session", params=["sync", "overlap"])
def served(
    request: pytest.FixtureRequest, zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Two drafts that agree on most tokens, trees of several policies, little KV; both scheduler modes.

    Under overlap earlier text is another source, shared between requests.
    """
    name = str(request.param)
    overlap = name == "overlap"
    suffix = {"drafts": "model,suffix", "suffix_scope": "key", "suffix_depth": 6} if overlap else {}
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(name),
        pair,
        "noisy",
        {**TREES, **EXACT_DRAFT, **suffix, "forced_depth": 6, "second_draft": str(pair / "second")},
        RESTLESS,
        overlap=overlap,
        **TIGHT,
    )
    yield from audited(zygote, name, server, probe)


@pytest.fixture(scope="session")
def sparse(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The draft reads another part of each context in every iteration, mostly by chance and else as `priced`
    says; little KV, requests taken back."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("sparse"),
        pair,
        "noisy",
        {**TREES, **EXACT_DRAFT, "policy": "priced", "draft_window": "auto"},
        {**RESTLESS, "windows": [0, 16, 17, 40, 100]},
        overlap=True,
        **TIGHT,
    )
    yield from audited(zygote, "sparse", server, probe)


@pytest.fixture(scope="session")
def copied(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Draft = target: every draft of a greedy request must be accepted."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("copied"),
        pair,
        "target",
        # All comes from the draft, which is a copy only as long as it is not rounded.
        {"policy": "chain-4", "max_depth": 4, "max_width": 3, "forced_depth": 0, **EXACT_DRAFT},
        overlap=True,  # every iteration advances by the most that the reserve of KV slots has room for
    )
    yield from audited(zygote, "copied", server, probe)


def alone_server(folder: Path, pair: Path, **flags: Any) -> tuple[Server, Probe]:
    """No draft model: the target drafts for itself and reads another part of each context in every iteration;
    little KV, requests taken back."""
    return adaserve_server(
        folder,
        pair,
        None,
        {**ALONE, **TREES},
        {**RESTLESS, "windows": [0, 16, 17, 40, 100]},
        overlap=True,
        **{**TIGHT, **flags},
    )


@pytest.fixture(scope="session")
def alone(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With contexts longer than what its KV pool holds."""
    server, probe = alone_server(tmp_path_factory.mktemp("alone"), pair, **{"context-length": 512})
    yield from audited(zygote, "alone", server, probe)


@pytest.fixture(scope="session")
def retrieving(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """No draft model: earlier text alone is the draft, shared among the requests of one API key."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("retrieving"),
        pair,
        None,
        {"policy": "chain-4", "max_depth": 4, "drafts": "suffix", "suffix_scope": "key"},
        overlap=True,
    )
    yield from audited(zygote, "retrieving", server, probe)


@pytest.fixture(scope="session")
def headed_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headed_pair")
    save_headed_pair(folder)
    return folder


@pytest.fixture(scope="session")
def mtp_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose checkpoint is also its draft."""
    folder = tmp_path_factory.mktemp("mtp_pair")
    save_with_layer(folder / "target")
    return folder


@pytest.fixture(scope="session")
def qwen3_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_pair")
    save_qwen3_pair(folder)
    return folder


@pytest.fixture(scope="session", params=["eagle3", "qwen3", "mtp", "medusa"])
def headed(
    request: pytest.FixtureRequest,
    zygote: Zygote,
    headed_pair: Path,
    qwen3_pair: Path,
    mtp_pair: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """An EAGLE-3 head drafts, over a Llama or a Qwen3, an MTP layer or Medusa heads; small chunks, trees of
    several policies, little KV, requests taken back."""
    name = str(request.param)
    draft = {"eagle3": "eagle3", "qwen3": "eagle3", "mtp": "target", "medusa": None}[name]
    pair = {"qwen3": qwen3_pair, "mtp": mtp_pair}.get(name, headed_pair)
    medusa = {"medusa": str(headed_pair / "medusa")} if name == "medusa" else {}
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(name),
        pair,
        draft,
        {**TREES, **EXACT_DRAFT, **medusa, "forced_depth": 6},
        {**RESTLESS, "compare_head": draft is not None},
        overlap=True,
        **{**TIGHT, "chunked-prefill-size": 16},
    )
    yield from audited(zygote, name, server, probe)


@pytest.fixture(scope="session")
def attacked(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that hostile requests are sent to. It must live, and hold nothing, to the end."""
    server, _ = adaserve_server(
        tmp_path_factory.mktemp("attacked"),
        pair,
        "noisy",
        TREES,
        {"fail_on": "cannot be taken in"},
        **{"served-model-name": "m", "enable-custom-logit-processor": True},
    )
    with server.running(zygote):
        yield server
        server.assert_idle_and_clean()

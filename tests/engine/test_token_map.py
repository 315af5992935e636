"""Drafts that know some tokens alone: what they can't propose the target says itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.engine.sources.token_map import keep_tokens, token_map
from adaserve.errors import UnsupportedError
from adaserve.host.device import DEVICE_PATH_ENV
from tests.engine.conftest import EXACT_DRAFT, Served, adaserve_server
from tests.engine.harness import Server, Zygote, run_jobs, workload
from tests.engine.pairs import VOCAB
from tests.engine.test_tensor_parallel import CORES

DEPTH = 4
KNOWN = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:383].tolist()


@pytest.fixture(
    scope="module", params=["cpu", "sglang", "device", pytest.param("ranks", marks=pytest.mark.slow)]
)
def knowing(
    request: pytest.FixtureRequest, zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The draft is a copy of the target without a quarter of its tokens: by our forward, by SGLang's, as on
    GPUs, and there in two halves."""
    way, folder = str(request.param), tmp_path_factory.mktemp(f"map_{request.param}")
    torch.save(KNOWN, folder / "tokens.pt")
    server, probe = adaserve_server(
        folder,
        pair,
        "target",
        {
            "policy": f"chain-{DEPTH}", "max_depth": DEPTH, "max_width": 3, "forced_depth": 0, **EXACT_DRAFT,
            "cpu_weights": "auto" if way == "cpu" else "off",
        },
        {"audit_every": 1 << 30},
        overlap=way in ("device", "ranks"),
        **{"speculative-token-map": folder / "tokens.pt", "tp-size": 1 + (way == "ranks")},
    )  # fmt: skip
    if way in ("device", "ranks"):
        server.environment[DEVICE_PATH_ENV] = "1"
    if way == "ranks":
        server.environment |= CORES
        del server.environment["ADASERVE_PROBE"]  # it knows one rank only
    with server.running(zygote):
        yield Served(way, server, probe)
        server.assert_idle_and_clean()


def verifications(said: list[int]) -> int:
    """What an answer takes behind the prefill's token: each is of up to DEPTH tokens that the draft
    knows, and one more."""
    count, at, known = 0, 1, set(KNOWN)
    while at < len(said):
        most = min(DEPTH, len(said) - at - 1)
        taken = next((i for i in range(most) if said[at + i] not in known), most)
        count, at = count + 1, at + taken + 1
    return count


def test_what_it_knows_is_accepted_and_nothing_else(knowing: Served, stock: Server) -> None:
    jobs = workload(24, seed=12, leave_every=0)
    answers = run_jobs(knowing.server, jobs)
    expected = run_jobs(stock, jobs)
    unknown = 0
    for answer, same in zip(answers, expected, strict=True):
        said: list[int] = answer["output_ids"]
        assert said == same["output_ids"]
        more = answer["meta_info"].get("spec_verify_ct", 0) - verifications(said)
        assert more == 0 or (more == 1 and knowing.name in ("device", "ranks")), (
            "near its end a draft made early is short"
        )
        unknown += len(set(said) - set(KNOWN))
    assert unknown > 20


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([3, 5, 5], "at least 3 different ids from 0 to 9.*has 3, and 2"),
        ([3, 5, 10], "has 3, and 2"),
        ([-1, 3, 5], "has 3, and 2"),
        ([3, 5], "has 2, and 2"),
        ([[3, 5, 7]], "at least 3 different"),
        ({"a": 1}, "cannot be read"),
    ],
)
def test_maps_that_are_refused(tmp_path: Path, listed: Any, message: str) -> None:
    torch.save(listed, tmp_path / "map.pt")
    with pytest.raises(UnsupportedError, match=message):
        token_map(str(tmp_path / "map.pt"), 10, 3)
    torch.save([3, 5, 7], tmp_path / "map.pt")
    assert token_map(str(tmp_path / "map.pt"), 10, 3).tolist() == [3, 5, 7]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map.pt").write_text("3 5 7")
    with pytest.raises(UnsupportedError, match=r"map.pt cannot be read"):
        token_map(str(tmp_path / "map.pt"), 10, 3)
    with pytest.raises(UnsupportedError, match=r"other.pt cannot be read \(there is no such file"):
        token_map(str(tmp_path / "other.pt"), 10, 3)


@pytest.mark.parametrize(
    "draft",
    [
        {"model": SimpleNamespace()},
        {"lm_head": SimpleNamespace(weight=torch.zeros(9, 4))},  # logits are made by a model inside
        {
            "lm_head": SimpleNamespace(weight=torch.zeros(9, 4).to(torch.float8_e4m3fn)),
            "logits_processor": object(),
        },
        {"lm_head": torch.nn.Linear(4, 9), "logits_processor": object()},
    ],
)
def test_drafts_whose_rows_cannot_be_taken_are_refused(draft: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"Namespace, the draft d, .*leave --speculative-token-map"):
        keep_tokens(SimpleNamespace(**draft), torch.tensor([3]), "d")

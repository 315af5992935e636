"""Draws on a device against a host's, and both against what the settings mean."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine import sampling
from adaserve.engine.device import Device
from adaserve.engine.logits import portions
from adaserve.engine.penalties import Penalties
from adaserve.engine.request_state import RequestState
from adaserve.noise import request_key
from tests.engine.gpu.factories import VOCABULARY
from tests.engine.gpu.test_no_waiting import Watch
from tests.engine.gpu.test_verify import Case
from tests.engine.memory import MostBytes
from tests.engine.test_lossless import tree_batch
from tests.engine.trees.factories import sampling_request

GENERATED = ([1, 2, 2], [5], [7, 8, 9, 7])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case([5, 17, 9], 0)


def states(seed: int = 0) -> list[RequestState]:
    """Requests with noise of their own."""
    return [
        RequestState("r", "default", np.inf, 0.0, generated=list(g), key=request_key(seed, i))
        for i, g in enumerate(GENERATED)
    ]


def step_of(device: Device, case: Case, requests: list[Any], seed: int = 0, **info: Any) -> sampling.Step:
    greedy = all(r.sampling_params.top_k == 1 for r in requests)
    values = {
        "is_all_greedy": greedy, "logit_bias": None, "has_custom_logit_processor": False,
        "sampling_seed": None,
    } | info  # fmt: skip
    v = case.verified
    tensors = device.put(v.arrays())
    given: Any = SimpleNamespace(**values)
    settings = sampling.Settings.of(requests)
    return sampling.Step(device, requests, states(seed), settings, given, v, tensors, Penalties())


def logits_of(case: Case) -> torch.Tensor:
    shape = (len(case.verified), VOCABULARY)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_adjusted_as_on_the_host(case: Case) -> None:
    requests = [
        sampling_request(frequency_penalty=0.5, min_new_tokens=6, stop_token_ids=[3]),
        sampling_request(),
        sampling_request(repetition_penalty=1.3),
    ]
    bias = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    adjusted = []
    for device in (case.host, case.device):
        logits = logits_of(case)
        sampling.adjust_logits(logits, step_of(device, case, requests, logit_bias=bias))
        adjusted.append(logits)
    torch.testing.assert_close(*adjusted)
    assert not torch.equal(adjusted[0], logits_of(case))


@pytest.mark.parametrize("name", ["host", "device"])
def test_greedy_beside_sampled(case: Case, name: str) -> None:
    logits = logits_of(case)
    requests = [sampling_request(top_k=1), sampling_request(top_k=1), sampling_request()]
    seen: set[int] = set()
    for seed in range(20):
        draws = sampling.draw(logits, step_of(getattr(case, name), case, requests, seed))
        greedy = torch.from_numpy(case.verified.row < 2)
        assert torch.equal(draws[greedy], logits.argmax(-1)[greedy])
        seen.add(int(draws[-1]))
    assert len(seen) > 5


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {}])
def test_distribution(case: Case, settings: dict[str, Any]) -> None:
    """Frequencies of many draws against the probabilities that the settings mean."""
    logits = logits_of(case)[:1].repeat(len(case.verified), 1) * 2
    probs = torch.softmax(logits[0], -1)
    order = probs.argsort(descending=True)
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    if "top_k" in settings:
        allowed[order[3:]] = False
    if "top_p" in settings:
        before = probs[order].cumsum(0) - probs[order]
        allowed[order[before > settings["top_p"]]] = False
    if "min_p" in settings:
        allowed = probs >= settings["min_p"] * probs.max()
    right = torch.where(allowed, probs, 0.0)
    right /= right.sum()
    counts = torch.zeros(VOCABULARY)
    for seed in range(400):
        requests = [sampling_request(**settings) for _ in GENERATED]
        draws = sampling.draw(logits, step_of(case.device, case, requests, seed))
        counts += torch.bincount(draws, minlength=VOCABULARY)
    assert not counts[~allowed].any()
    assert (counts / counts.sum() - right).abs().max() < 0.02


SETTINGS: list[list[dict[str, Any]]] = [
    [{}, {}, {}],
    [{"top_k": 1}, {}, {"top_p": 0.7}],
    [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.2}],
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_draws_are_the_hosts(case: Case, settings: list[dict[str, Any]], temperature: float) -> None:
    """The same requests draw the same tokens on a device and on the host, filtered ones too."""
    requests = [sampling_request(temperature=temperature, **s) for s in settings]
    logits, drawn = logits_of(case) * 3, set()
    for seed in range(20):
        right, got = (
            sampling.draw(logits, step_of(device, case, requests, seed)).tolist()
            for device in (case.host, case.device)
        )
        assert got == right
        drawn.add(tuple(got))
    assert len(drawn) > 4, "the draws do not depend on the requests"


@pytest.mark.parametrize("name", ["host", "device"])
@pytest.mark.parametrize("seeded", [False, True])
def test_a_draw_does_not_depend_on_what_neighbours_ask_for(
    case: Case, name: str, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all on their filters, which once sent the whole batch another way."""

    def plain(probs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (
            probs * (1 + (seed[:, None] * 7 + positions[:, None] * 3 + torch.arange(VOCABULARY)) % 11)
        ).argmax(-1)

    def filtered(probs: torch.Tensor, *rest: Any) -> torch.Tensor:
        return probs.argmin(-1)

    monkeypatch.setattr(sampling, "sampling_from_probs_torch", plain)
    monkeypatch.setattr(sampling, "top_k_top_p_min_p_sampling_from_probs_torch", filtered)
    device, logits = getattr(case, name), logits_of(case) * 2
    info = {"sampling_seed": torch.tensor([11, 12, 13])} if seeded else {}
    first = case.verified.row == 0
    alone = sampling.draw(logits, step_of(device, case, [sampling_request()] * 3, **info)).numpy()[first]
    for beside in ({"top_p": 0.3}, {"top_k": 1}, {"min_p": 0.4, "temperature": 0.2}):
        requests = [sampling_request(), sampling_request(**beside), sampling_request(**beside)]
        draws = sampling.draw(logits, step_of(device, case, requests, **info)).numpy()
        assert np.array_equal(draws[first], alone)


def test_settings_have_their_types_whatever_requests_write(case: Case) -> None:
    """1 for 1.0, say: a GPU's kernel would be compiled for whole numbers while requests wait."""
    requests = [sampling_request(temperature=1, top_k=7, top_p=1, min_p=0)] * 3
    names = ("temperature", "top_k", "top_p", "min_p")
    where, *settings = step_of(case.device, case, requests).columns(np.arange(4), *names)
    assert [s.dtype for s in settings] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert where.dtype == torch.int64 and [s.tolist() for s in settings] == [[v] * 4 for v in (1, 7, 1, 0)]


@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_portions_draw_the_same(
    case: Case, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, drawn = [sampling_request(**s) for s in settings], []
    for rows in (1000, 3):
        monkeypatch.setattr(portions, "ALIGNED_ROWS", 1)
        monkeypatch.setattr(portions, "MAX_VALUES", rows * VOCABULARY)
        drawn.append(sampling.draw(logits_of(case) * 3, step_of(case.device, case, requests)).tolist())
    assert drawn[0] == drawn[1]


ROWS, WIDE = 24, 4096
"""Tokens that a request verifies, and a vocabulary for it: far more logits than a portion has."""

ASKED: dict[str, dict[str, Any]] = {
    "noise": {},
    "filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1,
                  "min_new_tokens": 99, "stop_token_ids": [3, 9]},
}  # fmt: skip


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_draws_take_bounded_memory_and_wait_for_nothing(
    case: Case, asked: str, bias: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a draw takes besides its logits does not grow with their number, except for one copy of those that
    are filtered and read again."""
    n = len(GENERATED)
    batch = tree_batch([list(range(1, ROWS // 2)), list(range(ROWS // 2))], n)
    monkeypatch.setattr(portions, "MAX_VALUES", 16 * WIDE)
    logits = torch.randn(len(batch), WIDE, generator=torch.Generator().manual_seed(1))
    values = {"is_all_greedy": False, "has_custom_logit_processor": False, "sampling_seed": None,
              "logit_bias": torch.zeros(n, WIDE) if bias else None}  # fmt: skip
    requests = [sampling_request(**ASKED[asked]) for _ in range(n)]
    info, tensors = SimpleNamespace(**values), case.device.put(batch.arrays())
    settings = sampling.Settings.of(requests)
    step = sampling.Step(case.device, requests, states(), settings, info, batch, tensors, Penalties(),
                         keeps=keeps)  # type: ignore[arg-type]  # fmt: skip
    with Watch() as watch, MostBytes() as memory:
        sampling.adjust_logits(logits, step)
        sampling.draw(logits, step)
    assert watch.waits == []
    copied = logits.nbytes * (asked == "filters" and keeps)
    assert memory.most <= copied + portions.BYTES_PER_VALUE * 16 * WIDE
    assert logits.numel() >= 4 * 16 * WIDE


def test_what_is_read_again_stays_unfiltered(case: Case) -> None:
    """Log-probabilities are told without the filters; what is drawn is the same."""
    step = step_of(case.device, case, [sampling_request(top_k=2)] * 3)
    kept, filtered = logits_of(case), logits_of(case)
    draws = [
        sampling.draw(logits, replace(step, keeps=keeps))
        for logits, keeps in ((kept, True), (filtered, False))
    ]
    assert torch.equal(*draws) and torch.equal(kept, logits_of(case))
    assert (filtered.isfinite().sum(1) == 2).all()


def test_seeds_belong_to_their_requests(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's seeded draw (a GPU kernel) gets every token's position and its request's seed."""
    asked: list[tuple[list[int], list[int]]] = []

    def draw(probs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        asked.append((seed.tolist(), positions.tolist()))
        return probs.argmax(-1).int()

    monkeypatch.setattr(sampling, "sampling_from_probs_torch", draw)
    seeds, v = torch.tensor([11, 12, 13]), case.verified
    step = step_of(case.device, case, [sampling_request()] * 3, sampling_seed=seeds)
    draws = sampling.draw(logits_of(case), step)
    assert asked == [(seeds[v.row].tolist(), v.positions.tolist())] and draws.dtype == torch.int64

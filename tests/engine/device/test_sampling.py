"""Draws on the device against the numpy worker's: adjusted logits equal, distributions as asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine import sampling as host
from adaserve.engine.device import sampling as device
from adaserve.noise import request_key
from tests.engine.device.test_verify import Case


def request(**over: Any) -> Any:
    values = {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
              "repetition_penalty": 1.0, "min_new_tokens": 0, "stop_token_ids": [3]} | over  # fmt: skip
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**values), grammar=None, eos_token_ids=[2], tokenizer=tokenizer
    )


def batch_of(requests: list[Any], temperature: float = 1.0, **over: Any) -> Any:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(r.sampling_params, name) for r in requests])

    info = SimpleNamespace(
        is_all_greedy=all(r.sampling_params.top_k == 1 for r in requests), logit_bias=None, grammars=None,
        has_custom_logit_processor=False, sampling_seed=None, top_ks=column("top_k"), top_ps=column("top_p"),
        min_ps=column("min_p"), temperatures=torch.full((len(requests), 1), temperature),
    )  # fmt: skip
    for name, value in over.items():
        setattr(info, name, value)
    return SimpleNamespace(sampling_info=info, reqs=requests, return_logprob=False, has_grammar=False)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case([5, 17, 9], 0)


def logits_of(case: Case) -> torch.Tensor:
    shape = (len(case.host.tokens), 131)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


STATES = [
    SimpleNamespace(generated=g, key=request_key(i)) for i, g in enumerate(([1, 2, 2], [5], [7, 8, 9, 7]))
]


def other_requests(seed: int) -> list[Any]:
    """Requests like those above with noise of their own."""
    return [SimpleNamespace(generated=s.generated, key=request_key(seed, i)) for i, s in enumerate(STATES)]


def test_adjusted_as_on_the_host(case: Case) -> None:
    requests = [
        request(frequency_penalty=0.5, min_new_tokens=6), request(), request(repetition_penalty=1.3),
    ]  # fmt: skip
    bias = torch.randn(3, 131, generator=torch.Generator().manual_seed(2))
    batch = batch_of(requests, logit_bias=bias)
    right = logits_of(case)
    host.adjust_logits(right, case.host, batch.sampling_info, requests, STATES)  # type: ignore[arg-type]
    _, got = device.draw(batch, case.device, logits_of(case), logits_of(case).argmax(-1), STATES)  # type: ignore[arg-type]
    assert got is not None
    torch.testing.assert_close(got, right)
    assert not torch.equal(right, logits_of(case))


def test_plain_greedy_needs_no_logits(case: Case) -> None:
    logits = logits_of(case)
    batch = batch_of([request(top_k=1)] * 3)
    draws, adjusted = device.draw(batch, case.device, logits, logits.argmax(-1), STATES)  # type: ignore[arg-type]
    assert adjusted is None and torch.equal(draws, logits.argmax(-1))


def test_greedy_beside_sampled(case: Case) -> None:
    logits = logits_of(case)
    batch = batch_of([request(top_k=1), request(top_k=1), request()])
    seen: set[int] = set()
    for seed in range(20):
        states = other_requests(seed)
        draws, _ = device.draw(batch, case.device, logits, logits.argmax(-1), states)
        greedy = case.device.row < 2
        assert torch.equal(draws[greedy], logits.argmax(-1)[greedy])
        seen.add(int(draws[-1]))
    assert len(seen) > 5


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {}])
def test_distribution(case: Case, settings: dict[str, Any]) -> None:
    """Frequencies of many draws against the probabilities that the settings mean."""
    logits = logits_of(case)[:1].repeat(len(case.host.tokens), 1) * 2
    probs = torch.softmax(logits[0], -1)
    order = probs.argsort(descending=True)
    allowed = torch.ones(131, dtype=torch.bool)
    if "top_k" in settings:
        allowed[order[3:]] = False
    if "top_p" in settings:
        before = probs[order].cumsum(0) - probs[order]
        allowed[order[before > settings["top_p"]]] = False
    if "min_p" in settings:
        allowed = probs >= settings["min_p"] * probs.max()
    right = torch.where(allowed, probs, 0.0)
    right /= right.sum()
    batch = batch_of([request(**settings)] * 3)
    counts = torch.zeros(131)
    for seed in range(400):
        draws, _ = device.draw(batch, case.device, logits, logits.argmax(-1), other_requests(seed))
        counts += torch.bincount(draws, minlength=131)
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
    batch = batch_of([request(**s) for s in settings], temperature)
    logits = logits_of(case) * 3
    drawn = set()
    for seed in range(20):
        states = other_requests(seed)
        keys = np.array([s.key for s in states], np.uint64)
        right = host.draw(logits.clone(), case.host, batch.sampling_info, keys)
        got, _ = device.draw(batch, case.device, logits, logits.argmax(-1), states)
        assert got.tolist() == right.tolist()
        drawn.add(tuple(got.tolist()))
    assert len(drawn) > 15, "the draws do not depend on the requests"


def test_seeds_belong_to_their_requests(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's seeded draw (a GPU kernel) gets every token's position and its request's seed."""
    asked: list[tuple[list[int], list[int]]] = []

    def draw(probs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        asked.append((seed.tolist(), positions.tolist()))
        return probs.argmax(-1).int()

    monkeypatch.setattr(device, "sampling_from_probs_torch", draw)
    logits, seeds = logits_of(case), torch.tensor([11, 12, 13])
    batch = batch_of([request()] * 3, sampling_seed=seeds)
    draws, _ = device.draw(batch, case.device, logits, logits.argmax(-1), STATES)  # type: ignore[arg-type]
    assert asked == [(seeds[case.device.row].tolist(), case.device.positions.tolist())]
    assert draws.dtype == torch.int64

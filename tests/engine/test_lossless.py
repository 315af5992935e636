"""Unit checks of the acceptance rule: draws against an exact distribution, with a wrong rule as control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine import sampling
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.logits import portions
from adaserve.engine.penalties import Penalties
from adaserve.engine.request_state import RequestState
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from adaserve.noise import request_key
from adaserve.patches.scheduler.no_allowed_token import TOO_EARLY
from tests.engine.chi_square import chi_square_p
from tests.engine.trees.factories import (
    VOCABULARY,
    decode_rows,
    drafted,
    random_selection,
    sampling_request,
    tensors_of,
)

VOCAB = 8
SAMPLES = 6000


def tree_batch(children: list[list[int]], repeat: int) -> verify.VerifyBatch:
    """``repeat`` equal rows. ``children[d]``: tokens of depth d + 1, all below the first token of depth d."""
    depth = np.array([0, *(d + 1 for d, level in enumerate(children) for _ in level)])
    tokens = np.array([0, *(t for level in children for t in level)])
    first = np.cumsum([0, 1, *(len(level) for level in children)])
    parent = np.array([0, *(first[d] for d, level in enumerate(children) for _ in level)])
    size = len(tokens)
    rows, column = np.arange(repeat), np.arange(size)
    path = [column, parent]
    while len(path) <= len(children):
        path.append(path[-1][parent])
    tree = np.tile([tokens, depth, 0 * depth, *path], repeat)
    row, places = np.repeat(rows, size), np.tile([depth, column], repeat)
    tree[3:] += row * size
    tree[2] = row
    batch = TreeBatch(*tree[:1], *places, rows, np.full(repeat, size), np.full(repeat, size))
    nodes = np.arange(repeat * (size - 1))
    return verify.VerifyBatch(batch, tree, row, rows * size, nodes, made_by={}, places=places)


def accept(batch: verify.VerifyBatch, draws: torch.Tensor) -> verify.Acceptance:
    tensors = tensors_of(batch.arrays())
    return verify.accept(tensors, draws, len(batch.root), batch.deepest, batch.deepest + 1)


def emitted(batch: verify.VerifyBatch, draws: torch.Tensor) -> list[tuple[int, ...]]:
    """Tokens that each row emits."""
    got = accept(batch, draws)
    every = zip(got.emitted.tolist(), got.count.tolist(), strict=True)
    return [tuple(row[: count + 1]) for row, count in every]


def first_token_p(draws: Sequence[tuple[int, ...]], probs: torch.Tensor) -> float:
    """How well the first emitted tokens fit ``probs``."""
    observed = np.bincount([d[0] for d in draws], minlength=VOCAB)
    return chi_square_p(observed, (probs * len(draws)).double().numpy())


def target_logits() -> torch.Tensor:
    return torch.tensor([2.0, 1.5, 1.0, 0.2, 0.0, -0.5, -1.0, -3.0])


def make_step(
    batch: verify.VerifyBatch,
    reqs: Sequence[Any],
    states: Sequence[RequestState],
    penalties: Penalties | None = None,
    **over: Any,
) -> sampling.Step:
    values: dict[str, Any] = {
        "is_all_greedy": all(r.sampling_params.top_k == 1 for r in reqs), "sampling_seed": None,
        "logit_bias": None, "has_custom_logit_processor": False,
    }  # fmt: skip
    info: Any = SimpleNamespace(**values | over)
    forward: Any = SimpleNamespace(shift=None)  # draws need no model
    tensors = tensors_of(batch.arrays())
    device = CpuDevice(forward, forward)
    settings = sampling.Settings.of(reqs)
    return sampling.Step(device, reqs, states, settings, info, batch, tensors, penalties or Penalties())


def states_of(rows: int) -> list[RequestState]:
    return [RequestState(f"r{r}", "default", np.inf, 0.0, key=request_key("test", r)) for r in range(rows)]


def draw(batch: verify.VerifyBatch, seeds: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    """Draws of equal requests that differ in their keys; the target's logits are the same everywhere."""
    n = len(batch.root)
    step = make_step(batch, [sampling_request(**settings)] * n, states_of(n), sampling_seed=seeds)
    return sampling.draw(target_logits().repeat(len(batch), 1), step)


def draw_rows(children: list[list[int]], **settings: Any) -> list[tuple[int, ...]]:
    batch = tree_batch(children, SAMPLES)
    return emitted(batch, draw(batch, **settings))


def at_step(alone: verify.VerifyBatch, step: int) -> verify.VerifyBatch:
    """Plain decoding of the token that follows ``step`` others."""
    return replace(alone, places=np.full_like(alone.places, step))


def test_tree_sampling_has_the_targets_distribution() -> None:
    for children in ([[0, 1, 3]], [[0, 1], [0, 2]], [[7]], [[0], [0], [0]]):
        rows = draw_rows(children)
        assert first_token_p(rows, target_logits().softmax(0)) > 1e-3
        # After the first child came the same distribution again: the nodes below must not bend it.
        below = [row[1:] for row in rows if row[0] == children[0][0] and len(row) > 1]
        if len(children) > 1 and len(below) > 500:
            assert first_token_p(below, target_logits().softmax(0)) > 1e-3


def test_filters_keep_their_distribution() -> None:
    probs = target_logits().softmax(0)
    top_k = torch.where(torch.arange(VOCAB) < 3, probs, 0.0)
    tempered = (target_logits() / 0.5).softmax(0)
    min_p = torch.where(tempered >= 0.3 * tempered[0], tempered, 0.0)
    rows = draw_rows([[0, 1, 3]], top_k=3)
    assert first_token_p(rows, top_k / top_k.sum()) > 1e-3
    rows = draw_rows([[0, 1, 3]], temperature=0.5, min_p=0.3)
    assert first_token_p(rows, min_p / min_p.sum()) > 1e-3
    rows = draw_rows([[0, 1, 3]], top_p=0.6)  # the nucleus is tokens 0 and 1
    nucleus = torch.where(torch.arange(VOCAB) < 2, probs, 0.0)
    assert first_token_p(rows, nucleus / nucleus.sum()) > 1e-3


def test_the_statistic_detects_the_soft_ratio_rule() -> None:
    """Accepting a beam child with min(1, p/q), q the draft's soft probability, bends the output: it shows."""
    generator = np.random.default_rng(0)
    p = target_logits().softmax(0).double().numpy()
    p /= p.sum()
    q = (target_logits() * 0.8).softmax(0).double().numpy()
    residual = np.maximum(p - q, 0)
    rows = []
    for _ in range(SAMPLES):
        accept = generator.random() < p[0] / q[0]  # child 0 is always offered, not sampled from q
        token = 0 if accept else generator.choice(VOCAB, p=residual / residual.sum())
        rows.append((int(token),))
    assert first_token_p(rows, target_logits().softmax(0)) < 1e-6


def test_the_statistic_detects_a_small_bend() -> None:
    """Power: five percent more of the offered child than the target gives is seen with this many samples."""
    p = target_logits().softmax(0).double().numpy()
    bent = p.copy()
    bent[0] *= 1.1
    bent[1:] *= (1 - bent[0]) / bent[1:].sum()
    draws = np.random.default_rng(1).choice(VOCAB, SAMPLES, p=bent / bent.sum())
    assert first_token_p([(int(d),) for d in draws], target_logits().softmax(0)) < 1e-3


def test_a_tree_emits_what_plain_decoding_emits() -> None:
    """Draws are a function of request and position: whatever was drafted, the text is the same."""
    rows = 60
    chain, alone = tree_batch([[0, 1, 2, 3], [0, 1, 2, 3]], rows), tree_batch([], rows)
    got = emitted(chain, draw(chain, top_p=0.9))
    for step in range(3):
        plain = draw(at_step(alone, step), top_p=0.9)
        assert all(int(plain[r]) == row[step] for r, row in enumerate(got) if len(row) > step)
    assert {len(row) for row in got} == {1, 2, 3}


def draw_by_seed(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Stands for SGLang's seeded kernel, which needs a GPU: a function of seed, position and distribution."""
    rows = zip(logprobs.double().exp().numpy(), seeds.tolist(), positions.tolist(), strict=True)
    draws = [np.random.default_rng([seed, at]).choice(len(p), p=p / p.sum()) for p, seed, at in rows]
    return torch.tensor(draws)[:, None]


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.layers.sampler.multinomial_with_seed", draw_by_seed)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}])
def test_seeded_trees_emit_what_seeded_decoding_emits(settings: dict[str, Any]) -> None:
    """Every node is drawn with its own request's seed and its own position, as plain decoding would."""
    seeds = torch.arange(40) * 7 + 1
    chain, alone = tree_batch([[0, 1, 2, 3], [0, 1, 2, 3]], len(seeds)), tree_batch([], len(seeds))
    rows = emitted(chain, draw(chain, seeds, **settings))
    logprobs = target_logits().softmax(0).log().repeat(len(seeds), 1)
    for step in range(3):
        plain = draw(at_step(alone, step), seeds, **settings)
        if not settings:
            assert torch.equal(plain, draw_by_seed(logprobs, seeds, torch.full_like(seeds, step))[:, 0])
        assert all(int(plain[r]) == row[step] for r, row in enumerate(rows) if len(row) > step)
    assert {len(row) for row in rows} == {1, 2, 3}


# -- neighbours ---------------------------------------------------------------------------------


Settings = list[dict[str, Any]]


def draws_beside(
    before: Settings, mine: dict[str, Any], behind: Settings, *, with_seed: bool
) -> list[tuple[int, ...]]:
    """What 30 requests that ask for ``mine`` draw at the nodes of a tree, each between such neighbours."""
    reqs = [sampling_request(**settings) for settings in (*before, mine, *behind)]
    batch, at = tree_batch([[0, 1], [2, 3]], len(reqs)), len(before)
    generator = torch.Generator().manual_seed(1)
    own, *others = (torch.randn(len(batch) // len(reqs), VOCAB, generator=generator) for _ in reqs)
    logits = torch.cat([*others[:at], own, *others[at:]])
    drawn = []
    for key in range(30):
        states, seeds = states_of(len(reqs)), torch.arange(900, 900 + len(reqs))
        states[at].key = key
        seeds[at] = key
        step = make_step(batch, reqs, states, sampling_seed=seeds if with_seed else None)
        drawn.append(tuple(sampling.draw(logits, step)[batch.row == at].tolist()))
    return drawn


NEIGHBOURS: list[Settings] = [
    [{}], [{"top_p": 0.5}], [{"top_k": 3}], [{"top_k": 1}], [{"temperature": 0.3, "top_p": 0.9}, {}],
]  # fmt: skip
MINE: Settings = [{}, {"top_p": 0.5}, {"temperature": 0.6, "top_k": 4}, {"top_k": 1}]


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("with_seed", [False, True])
@pytest.mark.parametrize("mine", MINE)
def test_draws_do_not_depend_on_what_neighbours_ask_for(mine: dict[str, Any], with_seed: bool) -> None:
    alone = draws_beside([], mine, [], with_seed=with_seed)
    # SGLang has no seeded min-p.
    for others in NEIGHBOURS if with_seed else [*NEIGHBOURS, [{"min_p": 0.3}]]:
        assert draws_beside([], mine, others, with_seed=with_seed) == alone
        assert draws_beside(others, mine, [], with_seed=with_seed) == alone
    assert mine == {"top_k": 1} or len(set(alone)) > 5, "nothing is random"


# -- penalties ----------------------------------------------------------------------------------


def penalized_by_hand(logits: torch.Tensor, text: list[int], req: Any) -> torch.Tensor:
    """SGLang's formula (srt/sampling/penaltylib) after a request has generated ``text``."""
    p, stops = req.sampling_params, set(req.sampling_params.stop_token_ids or ())
    stops |= set(req.eos_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
    stops |= {req.tokenizer.eos_token_id} - {None}
    out = logits.double().clone()
    for token in range(len(out)):
        times = text.count(token)
        out[token] -= p.frequency_penalty * times
        if times:
            out[token] -= p.presence_penalty
        if len(text) < p.min_new_tokens and token in stops:
            out[token] += TOO_EARLY
        if times:
            out[token] *= p.repetition_penalty if out[token] < 0 else 1 / p.repetition_penalty
    return out.float()


def stopping_request(**over: Any) -> Any:
    """All four places that SGLang knows stop tokens from."""
    req = sampling_request(stop_token_ids={3}, **over)
    req.eos_token_ids, req.tokenizer.additional_stop_token_ids, req.tokenizer.eos_token_id = {4}, {5}, 6
    return req


PENALIZED = [
    stopping_request(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.3, min_new_tokens=8),
    sampling_request(),
    sampling_request(repetition_penalty=1.5),
    sampling_request(frequency_penalty=-0.7),
    sampling_request(presence_penalty=0.9),
    stopping_request(min_new_tokens=3),
]
BEFORE_THE_ROOT = [[2, 9, 2, 11, 4], [8, 8], [12, 6, 12], [1, 1], [7, 5], []]


@pytest.fixture(params=[False, True], ids=["at once", "in portions"])
def portioned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether logits are worked on a few rows at a time."""
    if request.param:
        monkeypatch.setattr(portions, "ALIGNED_ROWS", 1)
        monkeypatch.setattr(portions, "MAX_VALUES", 5 * VOCABULARY)
    return bool(request.param)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_node_has_the_penalties_of_its_own_path(seed: int, biased: bool, portioned: bool) -> None:
    rows = decode_rows([5, 9, 3, 7, 4, 6])
    for state, before in zip(rows.states, BEFORE_THE_ROOT, strict=True):
        state.generated[:0] = before
    proposal = drafted(rows, 4, 3)
    batch = verify.build(rows, proposal, random_selection(proposal.trees, np.random.default_rng(seed), 0.8))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(batch), VOCABULARY, generator=generator)
    bias = torch.randn(len(rows), VOCABULARY, generator=generator) if biased else None
    adjusted = logits.clone()
    sampling.adjust_logits(adjusted, make_step(batch, PENALIZED, rows.states, logit_bias=bias))
    told_apart = False
    for i in range(len(batch)):
        path, node, row = [], i, int(batch.row[i])
        while batch.depth[node]:
            path.append(int(batch.tokens[node]))
            node = int(batch.parent[node])
        generated = rows.states[row].generated
        exact = penalized_by_hand(logits[i], [*generated, *reversed(path)], PENALIZED[row])
        told_apart |= not torch.equal(exact, penalized_by_hand(logits[i], generated, PENALIZED[row]))
        if bias is not None:
            exact += bias[row]
        elif row == 1:
            assert torch.equal(adjusted[i], logits[i]), "a request without penalties was touched"
        torch.testing.assert_close(adjusted[i], exact, rtol=1e-6, atol=1e-6)
    assert told_apart, "the penalties at the roots would have done"


def test_penalties_follow_requests_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new tokens are uploaded, and what is known of a request is that of no other."""
    rows, penalties = decode_rows([5, 9, 3, 7, 4, 6]), Penalties()
    for state, before in zip(rows.states, BEFORE_THE_ROOT, strict=True):
        state.generated[:0] = 50 * before
    uploaded: list[int] = []
    inner = CpuDevice.put

    def put(self: CpuDevice, arrays: Any) -> Any:
        uploaded.append(sum(a.nbytes for a in arrays.values()))
        return inner(self, arrays)

    monkeypatch.setattr(CpuDevice, "put", put)
    for served in ([0, 2], [0, 2, 3, 4], [3, 0], [5, 4, 3, 0], [2, 0]):
        states, reqs = [rows.states[r] for r in served], [PENALIZED[r] for r in served]
        for state in states:
            state.generated.append(len(state.generated) % VOCABULARY)
        batch = tree_batch([[1, 2], [1]], len(served))
        logits = torch.randn(len(batch), VOCABULARY, generator=torch.Generator().manual_seed(1))
        got, right = logits.clone(), logits.clone()
        sampling.adjust_logits(got, make_step(batch, reqs, states, penalties))
        sampling.adjust_logits(right, make_step(batch, reqs, states))
        assert torch.equal(got, right) and not torch.equal(got, logits)
    known, anew = uploaded[4], uploaded[5]  # of two requests that were there before
    assert known < 600 < anew


def test_a_grammar_that_only_allows_the_end_prevails_over_min_new_tokens() -> None:
    """Else nothing would be left to choose."""

    def only_the_end(logits: torch.Tensor, *_: Any) -> None:
        logits[:, np.arange(VOCAB) != 4] = -torch.inf

    logits, ending = torch.zeros(1, VOCAB), stopping_request(min_new_tokens=8)
    step = make_step(tree_batch([], 1), [ending], states_of(1))
    sampling.adjust_logits(logits, replace(step, allowed=SimpleNamespace(mask=only_the_end)))  # type: ignore[arg-type]
    assert logits.softmax(dim=-1)[0, 4] == 1.0


def test_greedy_walk_takes_the_deepest_matching_path() -> None:
    batch = tree_batch([[3, 5], [2], [7]], 2)
    # Row 0 accepts 3, 2, 7; row 1 accepts the childless 5.
    draws = torch.tensor([3, 2, 9, 7, 4, 5, 1, 6, 1, 1])
    acceptance = accept(batch, draws)
    assert acceptance.count.tolist() == [3, 1]
    assert acceptance.bonus.tolist() == [4, 6]
    assert np.flatnonzero(acceptance.accepted).tolist() == [0, 1, 3, 4, 5, 7]
    assert acceptance.emitted.tolist() == [[3, 2, 7, 4], [5, 6, 0, 0]]
    assert emitted(batch, draws) == [(3, 2, 7, 4), (5, 6)]

"""Verifications that read prompts in the same forward, against those of a host, and against two forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import EagerGraph
from adaserve.engine.gpu.mixed import MIN_TOKENS, MixedForward, beside
from adaserve.engine.gpu.prompts import MAX_TOKENS
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import SIZES, Requests, TinyModel, device_forward
from tests.engine.gpu.test_decode import TOKENS, Run, greedy
from tests.engine.gpu.test_prompts import LEFT, Otherwise, forward_batch, short_prompts

WIDTH = 8  # of the windows of trees


def trees_of(requests: Requests, nodes: list[int], seed: int = 0) -> TreeBatch:
    """Random trees of so many tokens, roots included, behind the cached tokens of the first requests."""
    rng, n = np.random.default_rng(seed), len(nodes)
    base, rows = np.array(requests.lengths[:n]), requests.pool_rows[:n]
    q_lens = np.array(nodes)
    seen = np.zeros((q_lens.sum(), WIDTH), np.bool_)
    depth, at = np.zeros(q_lens.sum(), np.int64), 0
    for count in nodes:
        for node in range(count):
            if node:
                parent = rng.integers(node)
                seen[at + node], depth[at + node] = seen[at + parent], depth[at + parent] + 1
            seen[at + node, node] = True
        at += count
    place = np.concatenate([np.arange(count) for count in nodes])
    tokens = rng.integers(0, 131, q_lens.sum())
    of = np.arange(n).repeat(q_lens)
    return TreeBatch(tokens, base[of] + depth, base[of] + place, rows, q_lens, base + WIDTH, seen)


def texts_of(requests: Requests, first: int, starts: list[int]) -> TreeBatch:
    """The texts of the other requests, from ``starts`` on."""
    texts = [requests.text(first + i)[start:] for i, start in enumerate(starts)]
    q_lens = np.array([len(text) for text in texts])
    return TreeBatch.causal(np.concatenate(texts), requests.pool_rows[first:], np.array(starts), q_lens)


Case = tuple[list[int], list[int], list[int], list[int]]
"""Cached tokens of what is verified and nodes of its trees, cached tokens of prompts and where they start."""

CASES: list[Case] = [
    ([17], [1], [12], [0]),
    ([17, 3], [5, 8], [1], [0]),
    ([40, 9, 22], [1, 1, 1], [30, 60], [0, 0]),
    ([40, 9, 22], [8, 3, 1], [30, 60, 44], [29, 7, 12]),
    ([5], [8], [90, 90, 90, 90, 90], [0, 0, 0, 0, 0]),  # 458 tokens
    ([3], [4], [2], [0]),  # texts that are shorter than windows
]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_cache_are_the_hosts(case: Case) -> None:
    cached, nodes, lengths, starts = case
    requests, n = Requests([*cached, *lengths]), len(cached)
    models = [TinyModel(requests.slots), TinyModel(requests.slots)]
    for model in models:
        requests.prefill(model, [*cached, *starts])
    trees, texts = trees_of(requests, nodes), texts_of(requests, n, starts)
    host = CpuForward(models[0], requests.req_to_token)
    verified = host.logits(host.run(trees))
    read = host.logits(host.run(texts))[texts.q_lens.cumsum() - 1]

    target = device_forward(requests, models[1], SIZES.verifications())
    target.mixed = MixedForward(target)
    target.run(trees)  # what is left of an earlier forward must not matter
    models[1].written.clear()
    target.take_runs()
    states = target.run_beside(trees, texts)
    assert len(models[1].written) == len(target.take_runs()) == 1
    torch.testing.assert_close(target.logits(states), verified, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.argmax(states), target.logits(states).argmax(-1))
    assert target.prompt_logits is not None
    torch.testing.assert_close(target.prompt_logits, read, rtol=1e-4, atol=1e-4)
    for one, two in zip(models[0].k + models[0].v, models[1].k + models[1].v, strict=True):
        torch.testing.assert_close(one[1:], two[1:], rtol=1e-4, atol=1e-4)


def test_what_was_read_outlives_the_forward() -> None:
    """The verified logits are changed while requests sample, and the next forward overwrites all of them."""
    requests = Requests([17, 12])
    target = device_forward(requests, TinyModel(requests.slots), SIZES.verifications())
    target.mixed = MixedForward(target)
    trees = trees_of(requests, [3])
    states = target.run_beside(trees, texts_of(requests, 1, [0]))
    assert target.prompt_logits is not None
    read, before = target.prompt_logits, target.prompt_logits.clone()
    target.logits(states).zero_()
    target.run(trees)  # padded to as many rows as there were
    assert torch.equal(read, before)


def test_every_size_has_a_graph_and_room() -> None:
    requests = Requests([5])
    target = device_forward(requests, TinyModel(requests.slots), SIZES.verifications())
    mixed, verified = MixedForward(target), SIZES.tokens.sizes[-1]
    assert [key.tokens for key in mixed.keys] == [576, 512, 384, 256, 192, 128, 96, 64, 48, 32]
    assert mixed.keys[0].tokens == MAX_TOKENS + verified and mixed.keys[-1].tokens == MIN_TOKENS
    for trees, texts in ((1, 1), (verified, 1), (verified, MAX_TOKENS), (1, MAX_TOKENS), (30, 200)):
        rows = min(trees, SIZES.most_rows - 1)
        nodes = [1] * (rows - 1) + [trees - rows + 1]
        batch = beside(flat(nodes, 64), flat([texts], None))
        key = mixed._fitting(batch, trees + 1)
        assert (key in mixed.keys) is (trees + 1 <= verified), "only with a piece for each"
        assert key.tokens >= len(batch) and key.rows > len(batch.q_lens) and key.pieces >= trees + 1
        assert batch.seen is not None and key.columns >= batch.seen.shape[1] and key.columns % 8 == 0
    assert all(key.pieces <= target.parts.logits._shape[0] for key in mixed.keys), "no room for logits"


def flat(nodes: list[int], width: int | None) -> TreeBatch:
    """Nothing but sizes."""
    q_lens = np.array(nodes)
    none, tokens = np.zeros(len(nodes), np.int64), np.zeros(q_lens.sum(), np.int64)
    seen = None if width is None else np.ones((len(tokens), width), np.bool_)
    return TreeBatch(tokens, tokens, tokens, none, q_lens, q_lens + 1000, seen)


def test_what_has_no_graph_runs_without() -> None:
    """More tokens are verified than any graph has room for."""
    requests = Requests([20] * 9 + [50])
    models = [TinyModel(requests.slots), TinyModel(requests.slots)]
    for model in models:
        requests.prefill(model, [*[20] * 9, 10])
    trees, texts = trees_of(requests, [8] * 9), texts_of(requests, 9, [10])
    host = CpuForward(models[0], requests.req_to_token)
    verified, read = host.logits(host.run(trees)), host.logits(host.run(texts))[-1:]
    target = device_forward(requests, models[1], SIZES.verifications())
    target.mixed = MixedForward(target)
    states = target.run_beside(trees, texts)
    assert not len(target.mixed.table)
    torch.testing.assert_close(target.logits(states), verified, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.prompt_logits, read, rtol=1e-4, atol=1e-4)


def test_where_memory_was_short_prompts_have_forwards_of_their_own() -> None:
    requests = Requests([5])
    target = device_forward(requests, TinyModel(requests.slots), SIZES.verifications())
    assert target.most_beside == 0
    target.mixed = mixed = MixedForward(target)
    assert target.most_beside == MAX_TOKENS
    mixed.table.capture = True
    mixed.table._graphs = {key: EagerGraph(str) for key in mixed.keys}
    assert target.most_beside == MAX_TOKENS
    del mixed.table._graphs[mixed.keys[-1]]
    assert target.most_beside == 0


@pytest.mark.parametrize("policy", ["none", "adaserve", "chain-3", "priced"])
def test_texts_are_greedy_while_prompts_are_read(policy: str) -> None:
    """In every other iteration. What is drafted ahead, queued unread or counted late is not lost for it."""
    run = Run(policy, overlap=True)
    target, table = run.loop.device.target, run.requests.req_to_token
    assert isinstance(target, GpuForward)
    target.mixed = MixedForward(target)
    rng = np.random.default_rng(0)
    while min(map(len, run.got)) < TOKENS:
        text = rng.integers(0, 131, rng.integers(1, 90)).tolist()
        prompt = TreeBatch.causal(
            np.array(text), np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(text)])
        )
        if run.iterations % 2:
            run.loop.read_beside(prompt)
        run.step()
        if run.iterations % 2 == 0:
            assert target.prompt_logits is not None
            assert target.prompt_logits.argmax(-1).tolist() == greedy(text, 1)
    run.loop.settle()
    run.check()
    assert len(table) == 1 + len(run.reqs), "row 0 was nobody's"
    read = [outcome.prefill_tokens for outcome in run.outcomes]
    assert len(read) == run.iterations and all((tokens > 0) == i % 2 for i, tokens in enumerate(read))
    assert all(outcome.prefilled for outcome in run.outcomes[1::2])


def test_sglang_gets_the_logits_of_prompts_that_were_read() -> None:
    """However many tokens they have, and once."""
    requests, otherwise = Requests([40, 12]), Otherwise(True)
    prompts = short_prompts(requests, otherwise)
    prompts._model.prompt_logits = torch.arange(2.0)[:, None]
    many = forward_batch(requests, [40, 12], [0, 0], input_ids=torch.zeros(MAX_TOKENS + 1))
    assert prompts.can_run_graph(many)
    assert prompts.execute(many).next_token_logits.flatten().tolist() == [0, 1]
    assert prompts._model.prompt_logits is None and not otherwise.ran
    assert prompts.execute(many) == "sglang"
    prompts._model.prompt_logits = torch.arange(3.0)[:, None]
    with pytest.raises(RuntimeError, match="3 prompts were read, and SGLang asks for 2"):
        prompts.execute(many)


def test_prompts_of_which_more_is_asked_are_read_again() -> None:
    requests, more = Requests([40, 12]), LEFT["log-probabilities"]
    prompts = short_prompts(requests, Otherwise(True))
    prompts._model.prompt_logits = torch.arange(2.0)[:, None]
    assert prompts.execute(forward_batch(requests, [40, 12], [0, 0], **more)) == "sglang"

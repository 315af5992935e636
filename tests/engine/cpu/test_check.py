"""The C kernels refuse what lies outside their arrays instead of reading foreign memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import Inputs, LlamaModel, build
from adaserve.engine.cpu.beam_arrays import BeamArrays
from adaserve.engine.trees.attention import TreeAttentionPlan
from tests.engine.cpu.factories import MAX_POSITIONS, Pool, hf_model, read_hf

TOKENS = 4
VOCAB = 131
SLOTS = 64


@dataclasses.dataclass
class Call:
    """One prefill of four tokens, every part of which a test may spoil."""

    ids: Any
    positions: Any
    slots: Any
    qo: Any
    kv: Any
    indices: Any
    mask: torch.Tensor | None = None

    @classmethod
    def good(cls) -> Call:
        n = list(range(TOKENS))
        return cls([5, 6, 7, 8], n.copy(), [9, 3, 4, 20], [0, TOKENS], [0, TOKENS], [9, 3, 4, 20])

    def inputs(self) -> Inputs:
        plan = TreeAttentionPlan(
            *(torch.tensor(v, dtype=torch.int32) for v in (self.qo, self.kv, self.indices)), self.mask
        )
        each = (torch.tensor(v, dtype=torch.int64) for v in (self.ids, self.positions, self.slots))
        return Inputs(*each, plan)


@pytest.fixture(scope="module")
def llama() -> LlamaModel:
    if build.load_kernels() is None:
        pytest.skip("no C compiler here")
    model = LlamaModel(*read_hf(hf_model()), storage="fp32")
    assert model.native is not None
    return model


def forward(llama: LlamaModel, call: Call) -> torch.Tensor:
    pool = Pool(llama.config, 2, SLOTS)
    return llama.forward(call.inputs(), pool.k, pool.v)


def replaced(name: str, at: int, value: int) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        getattr(call, name)[at] = value

    return spoil


def go_back(call: Call) -> None:
    call.qo, call.kv, call.mask = [0, 2, TOKENS], [0, TOKENS + 1, TOKENS], torch.ones(8, dtype=torch.bool)


BAD: dict[str, tuple[Callable[[Call], None], str]] = {
    "token -1": (replaced("ids", 1, -1), "token id"),
    "token V": (replaced("ids", 3, VOCAB), "token id"),
    "token 2^62": (replaced("ids", 0, 2**62), "token id"),
    "position -1": (replaced("positions", 2, -1), "position"),
    "position beyond the table": (replaced("positions", 2, MAX_POSITIONS), "position"),
    "slot -1": (replaced("slots", 0, -1), "token's slot"),
    "slot beyond the pool": (replaced("slots", 0, SLOTS), "token's slot"),
    "key -1": (replaced("indices", 3, -1), "cached key"),
    "key beyond the pool": (replaced("indices", 3, SLOTS), "cached key"),
    "queries beyond the tokens": (replaced("qo", 1, TOKENS + 1), "spans"),
    "queries fewer than the tokens": (replaced("qo", 1, TOKENS - 1), "spans"),
    "queries before the first": (replaced("qo", 0, -1), "spans"),
    "keys beyond their array": (replaced("kv", 1, TOKENS + 1), "spans"),
    "keys of negative length": (replaced("kv", 1, -1), "spans"),
    "keys before the first": (replaced("kv", 0, -1), "spans"),
    "keys that go back": (go_back, "spans"),
    "fewer keys than queries": (replaced("kv", 1, TOKENS - 1), "spans"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_forward_outside_its_arrays_is_refused(llama: LlamaModel, name: str) -> None:
    spoil, words = BAD[name]
    call = Call.good()
    spoil(call)
    with pytest.raises(IndexError, match=words):
        forward(llama, call)


def test_a_mask_that_is_too_small_is_refused(llama: LlamaModel) -> None:
    call = Call.good()
    call.mask = torch.ones(TOKENS * TOKENS - 1, dtype=torch.bool)
    with pytest.raises(IndexError, match="mask"):
        forward(llama, call)


def test_a_mask_is_of_the_first_requests_alone(llama: LlamaModel) -> None:
    """The others are causal: they need no mask, and as many keys as queries."""

    def two(masked: int, indices: list[int]) -> Inputs:
        both = Call([5, 6, 7, 8], [0, 1, 2, 3], [9, 3, 4, 20], [0, 2, 4], [0, 2, len(indices)], indices)
        inputs = both.inputs()
        plan = dataclasses.replace(inputs.plan, custom_mask=torch.ones(masked, dtype=torch.bool), texts=1)
        return dataclasses.replace(inputs, plan=plan)

    pool = Pool(llama.config, 2, SLOTS)
    assert torch.isfinite(llama.forward(two(4, [9, 3, 4, 20]), pool.k, pool.v)).all()
    for masked, indices in ((3, [9, 3, 4, 20]), (4, [9, 3, 4])):
        with pytest.raises(IndexError, match="spans"):
            llama.forward(two(masked, indices), pool.k, pool.v)


def test_inputs_of_different_lengths_are_refused(llama: LlamaModel) -> None:
    call = Call.good()
    call.slots = call.slots[:-1]
    with pytest.raises(ValueError, match="one slot for each token"):
        forward(llama, call)


def test_a_refused_forward_leaves_the_next_one_alone(llama: LlamaModel) -> None:
    expected = forward(llama, Call.good())
    call = Call.good()
    call.ids[2] = VOCAB
    with pytest.raises(IndexError):
        forward(llama, call)
    assert torch.equal(forward(llama, Call.good()), expected)


def test_the_last_valid_values_pass(llama: LlamaModel) -> None:
    call = Call.good()
    call.ids[3], call.positions[3], call.slots[3], call.indices[3] = (
        VOCAB - 1, MAX_POSITIONS - 1, SLOTS - 1, SLOTS - 1,
    )  # fmt: skip
    assert torch.isfinite(forward(llama, call)).all()


def beams(*texts: list[int], width: int = 2, depth: int = 2) -> BeamArrays:
    """``texts``: slots of each row's text, the root's last."""
    texts, window, nodes = texts or ([9, 3, 4, 20],), 1 + width * depth, width * depth
    a, free = len(texts), iter(range(30, SLOTS))
    slots = [[*text, *(next(free) for _ in range(window - 1))] for text in texts]
    return BeamArrays(
        width, depth, base=np.array([len(text) - 1 for text in texts], np.int64),
        kv_indptr=np.cumsum([0, *map(len, slots)]).astype(np.int32),
        kv_indices=np.concatenate(slots).astype(np.int32), columns=np.arange(1, window, dtype=np.int32),
        scale=np.ones(a, np.float32), spread=np.zeros(a, np.float32), keys=np.ones(a, np.uint64),
        tokens=np.zeros((a, nodes), np.int64), parents=np.zeros((a, nodes), np.int64),
        logprobs=np.zeros((a, nodes)), visible=np.zeros((a, nodes, window), np.bool_),
    )  # fmt: skip


def search(llama: LlamaModel, arrays: BeamArrays, call: Call | None = None) -> int:
    pool = Pool(llama.config, 2, SLOTS)
    assert llama.native is not None
    return llama.native.beam_search((call or Call.good()).inputs(), pool.k, pool.v, arrays, None)


def test_a_beam_search_runs(llama: LlamaModel) -> None:
    assert search(llama, beams()) == 2


@pytest.mark.parametrize(
    ("name", "at", "value", "words"),
    [
        ("columns", 1, 5, "beams"),
        ("columns", 1, -1, "beams"),
        ("kv_indptr", 1, 20, "beams"),
        ("kv_indptr", 1, 4, "beams"),
        ("kv_indices", 4, SLOTS, "slot"),
        ("kv_indices", 0, -1, "cached key"),
        ("base", 0, MAX_POSITIONS, "position"),
    ],
)
def test_a_beam_search_outside_its_arrays_is_refused(
    llama: LlamaModel, name: str, at: int, value: int, words: str
) -> None:
    arrays = beams()
    getattr(arrays, name)[at] = value
    with pytest.raises(IndexError, match=words):
        search(llama, arrays)


@pytest.mark.parametrize("qo", [[0, TOKENS], [0, TOKENS, TOKENS]], ids=["fewer rows", "no root"])
def test_a_beam_search_needs_a_root_in_each_row(llama: LlamaModel, qo: list[int]) -> None:
    call = Call.good()
    call.qo, call.kv = qo, [0, *[TOKENS] * (len(qo) - 1)]
    with pytest.raises(IndexError, match="beams"):
        search(llama, beams([9, 3], [4, 20]), call)


def test_roots_see_what_a_mask_shows_them(llama: LlamaModel) -> None:
    """Where a mask is given, it is the last one of each row's queries that counts."""
    causal = Call([5, 6, 7, 8], [0, 0, 1, 2], [9, 3, 4, 20], [0, 1, 4], [0, 1, 4], [9, 3, 4, 20])
    found = []
    for mask in (None, [1, *np.tril(np.ones((3, 3), int)).ravel()], [1, 1, 0, 0, 1, 1, 0, 0, 0, 1]):
        causal.mask = None if mask is None else torch.tensor(mask, dtype=torch.bool)
        found.append(beams([9], [3, 4, 20]))
        search(llama, found[-1], causal)
    assert np.array_equal(found[1].logprobs, found[0].logprobs)
    assert np.array_equal(found[2].logprobs[0], found[0].logprobs[0])
    assert not np.array_equal(found[2].logprobs[1, :2], found[0].logprobs[1, :2]), "it saw what was hidden"

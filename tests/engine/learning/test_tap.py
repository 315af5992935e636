"""The tap writes down what the target says at accepted tokens, and nothing that it may not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.learning.tap import MAX_OPEN, MAX_STATE, MIN_POSITIONS, Tap
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.transfer import QueuedCopy, put
from adaserve.engine.trees import verify
from adaserve.noise import gumbel
from adaserve.trainer import sharpening_fit
from adaserve.trainer.records import Record
from adaserve.trainer.shared_memory import Ring, allocate
from tests.engine.trees.factories import (
    FakeModel,
    decode_rows,
    drafted,
    random_selection,
    sampling_request,
    tensors_of,
)


def request(prompt: list[int], **params: Any) -> Any:
    """What the tap reads of SGLang's requests."""
    req = sampling_request(**{"logit_bias": None, "top_k": 1, **params})
    req.origin_input_ids, req.grammar, req.custom_logit_processor = prompt, None, None
    req.multimodal_inputs = None
    return req


DEVICE: Any = SimpleNamespace(put=lambda arrays: put(arrays, torch.device("cpu")))


class Service:
    """Greedy requests served by a target that looks at one token only, with trees of a draft that is wrong
    now and then."""

    def __init__(
        self, ring: Ring, prompts: list[list[int]], share: float = 1.0, states: Any = None, **params: Any
    ) -> None:
        self.tap, self.model = Tap(share, states), FakeModel()
        self.tap.ring = ring
        self.target = FakeModel(
            self.model.table + torch.randn(23, 23, generator=torch.Generator().manual_seed(9))
        )
        self.reqs = [request(p, **params) for p in prompts]
        self.states = [
            RequestState(f"r{i}", "default", math.inf, 0.0, generated=[i + 1]) for i in range(len(prompts))
        ]
        self.lengths = [len(p) for p in prompts]
        self.places = [list(range(n)) for n in self.lengths]  # where KV was when it was recorded
        self.rng = np.random.default_rng(0)

    def start(self) -> None:
        for req, state in zip(self.reqs, self.states, strict=True):
            self.tap.started(req, state)

    def iterate(self) -> None:
        plain = decode_rows(self.lengths)
        rows = DecodeRows(self.states, plain.seq_lens, plain.pool_rows, plain.running)
        proposal = drafted(rows, 4, 2)
        verified = verify.build(rows, proposal, random_selection(proposal.trees, self.rng, 0.9))
        says = self.target.table[torch.from_numpy(verified.tokens)]
        tensors, recorded = tensors_of(verified.arrays()), self.tap.rows(rows)
        acceptance = verify.accept(tensors, says.argmax(-1), len(rows), verified.deepest, 5)
        known = {"count": acceptance.count, "emitted": acceptance.emitted}
        if len(recorded):
            known |= self.tap.verified(DEVICE, rows, recorded, verified, tensors, acceptance, says)
            self.tap.heard(rows, recorded, QueuedCopy(known).read())
        accepted = acceptance.accepted.numpy()
        for row, places in enumerate(self.places):
            places.extend(verified.batch.places[accepted & (verified.row == row)].tolist())
        for row, state in enumerate(self.states):
            count = int(acceptance.count[row]) + 1
            state.advance(acceptance.emitted[row, :count].tolist())
            self.lengths[row] += count


@pytest.fixture
def ring() -> Iterator[tuple[Ring, Ring]]:
    fd = allocate(1 << 20)
    yield Ring(fd), Ring(fd)
    os.close(fd)


def read_all(ring: Ring) -> list[Record]:
    records = []
    while (data := ring.read()) is not None:
        records.append(Record.from_bytes(data))
    return records


def test_every_accepted_position_is_written_down_once(ring: tuple[Ring, Ring]) -> None:
    service = Service(ring[0], [[3, 4, 5, 6, 7], [8, 9]])
    service.start()
    for _ in range(12):
        service.iterate()
    for state in service.states:
        service.tap.finished(state.rid)
    records = read_all(ring[1])
    assert len(records) == service.tap.recorded == 2
    for record, req, state in zip(records, service.reqs, service.states, strict=True):
        text = [*req.origin_input_ids, *state.generated]
        assert record.tokens.tolist() == text
        assert record.start == len(req.origin_input_ids) and record.start + len(record) + 1 == len(text)
        assert len(record) > 12, "nothing was ever accepted"
        at = record.tokens[record.start : record.start + len(record)]
        expected = torch.log_softmax(service.target.table[torch.from_numpy(at.astype(np.int64))], -1)
        assert torch.allclose(sharpening_fit.target(record), expected, atol=0.02)
        assert record.temperature == 0


@pytest.mark.parametrize("ignores", [False, True])
def test_what_was_accepted_behind_the_end_of_a_text_is_not_recorded(
    ring: tuple[Ring, Ring], ignores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang cuts it, so nobody was served it."""
    monkeypatch.setattr("adaserve.engine.learning.tap.MIN_POSITIONS", 1)
    plain = Service(ring[0], [[3, 4, 5, 6, 7]])
    plain.start()
    for _ in range(12):
        plain.iterate()
    text = plain.states[0].generated
    stop = max(set(text), key=text.index)
    assert text.index(stop) > 1
    service = Service(ring[0], [[3, 4, 5, 6, 7]], stop_token_ids=[stop], ignore_eos=ignores)
    service.start()
    for _ in range(12):
        service.iterate()
    service.tap.finished("r0")
    (record,) = read_all(ring[1])
    written = record.tokens[record.start :].tolist()
    assert written == (text if ignores else text[: text.index(stop) + 1])


def test_heads_get_the_hidden_states_of_all_tokens_but_the_last(ring: tuple[Ring, Ring]) -> None:
    """Of prompts from where they are committed, of candidates from where they were verified."""

    def states(pool_rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.stack((pool_rows.expand_as(places), places), -1).float()

    service = Service(ring[0], [[3, 4, 5, 6, 7], [8, 9]], states=states)
    service.start()
    for _ in range(12):
        service.iterate()
    for state in service.states:
        service.tap.finished(state.rid)
    records, rows = read_all(ring[1]), decode_rows(service.lengths).pool_rows.tolist()
    for record, row, places in zip(records, rows, service.places, strict=True):
        assert record.states is not None and record.states.shape == (record.start + len(record), 2)
        assert record.states[:, 0].tolist() == [row] * len(record.states)
        assert record.states[:, 1].tolist() == places


def test_hidden_states_end_where_float16_does(ring: tuple[Ring, Ring]) -> None:
    """Some models have a few that are a thousand times as large as the others."""
    large = torch.tensor([[1e6, -1e6, 2.0]])
    service = Service(ring[0], [[3, 4, 5]], states=lambda row, places: large.expand(*places.shape, -1))
    service.start()
    for _ in range(12):
        service.iterate()
    service.tap.finished("r0")
    (record,) = read_all(ring[1])
    assert record.states is not None and len(np.unique(record.states, axis=0)) == 1
    assert record.states[0].tolist() == [MAX_STATE, -MAX_STATE, 2.0]


@pytest.mark.parametrize(
    "forbid",
    [
        lambda r, s: setattr(s, "learn", False),
        lambda r, s: setattr(r.sampling_params, "repetition_penalty", 1.2),
        lambda r, s: setattr(r.sampling_params, "logit_bias", {"3": 1.0}),
        lambda r, s: setattr(r, "grammar", object()),
        lambda r, s: setattr(r, "custom_logit_processor", "x"),
        lambda r, s: setattr(r, "multimodal_inputs", object()),
    ],
)
def test_what_may_not_be_recorded_is_not(ring: tuple[Ring, Ring], forbid: Any) -> None:
    service = Service(ring[0], [[3, 4, 5], [8, 9]])
    forbid(service.reqs[0], service.states[0])
    service.start()
    for _ in range(8):
        service.iterate()
    for state in service.states:
        service.tap.finished(state.rid)
    (record,) = read_all(ring[1])
    assert record.tokens[:2].tolist() == [8, 9]


def test_open_records_take_half_as_much_memory_as_the_ring() -> None:
    """Those that would need more end early. What they hold is counted, and is held by nothing else."""
    fd = allocate(4096)
    service = Service(Ring(fd), [[3, 4 + i] for i in range(6)])
    service.start()
    reader, records = Ring(fd), list[Record]()
    for _ in range(14):
        service.iterate()
        records += read_all(reader)
        held = [a for opened in service.tap._open.values() for a in opened.logprobs]
        assert sum((a if a.base is None else a.base).nbytes for a in held) <= reader.capacity // 2
        for req, state in zip(service.reqs, service.states, strict=True):
            if state.rid not in service.tap._open:
                service.tap.started(req, state)
    assert len(records) > 2 and all(len(r) >= MIN_POSITIONS for r in records)
    assert service.tap.dropped == 0
    os.close(fd)


def test_only_a_share_is_recorded(ring: tuple[Ring, Ring]) -> None:
    service = Service(ring[0], [[3, 4]] * 4, share=0.5)
    for state, key in zip(service.states, (0, 2**63 - 1, 2**63, 2**64 - 1), strict=True):
        state.key = key
    service.start()
    for _ in range(8):
        service.iterate()
    for state in service.states:
        service.tap.finished(state.rid)
    assert [r.key for r in read_all(ring[1])] == [0, 2**63 - 1]


def test_a_text_with_a_gap_is_dropped(ring: tuple[Ring, Ring]) -> None:
    service = Service(ring[0], [[3, 4, 5]])
    service.start()
    service.iterate()
    service.lengths[0] += 1
    for _ in range(8):
        service.iterate()
    service.tap.finished("r0")
    assert read_all(ring[1]) == []


def test_the_number_of_open_records_is_bounded(ring: tuple[Ring, Ring]) -> None:
    service = Service(ring[0], [[3, 4]] * (MAX_OPEN + 3))
    service.start()
    while max(service.lengths) < 55:  # the factories' slots end at 64
        service.iterate()
    for state in service.states:
        service.tap.finished(state.rid)
    records = read_all(ring[1])
    assert len(records) == MAX_OPEN


def test_nothing_is_recorded_while_the_ring_is_half_full(ring: tuple[Ring, Ring]) -> None:
    while ring[0].used <= ring[0].capacity // 2:
        assert ring[0].write(b"x" * 1000)
    service = Service(ring[0], [[3, 4, 5]])
    service.start()
    for _ in range(8):
        service.iterate()
    service.tap.finished("r0")
    assert service.tap.recorded == service.tap.dropped == 0


def test_a_long_text_is_cut(ring: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve.engine.learning.tap.MAX_POSITIONS", 12)
    monkeypatch.setattr("adaserve.engine.learning.tap.MAX_CONTEXT", 2)
    service = Service(ring[0], [[3, 4, 5, 6]])
    service.states[0].key = 7
    service.start()
    for _ in range(14):
        service.iterate()
    (record,) = read_all(ring[1])
    assert record.start == 2 and record.tokens[:2].tolist() == [5, 6]
    assert 12 <= len(record) < 12 + 5 and record.start + len(record) + 1 == len(record.tokens)
    drawn_by = gumbel(np.full(len(record), 7, np.uint64), 4 + np.arange(len(record)), 23)
    assert (sharpening_fit.noise(record, 23).numpy() == drawn_by).all(), "noise of other positions"


def test_a_server_without_a_tokenizer_knows_the_ends_of_texts(ring: tuple[Ring, Ring]) -> None:
    """With --skip-tokenizer-init a request still has those that it states, and the model's."""
    service = Service(ring[0], [[3, 4, 5]], stop_token_ids=[7])
    service.reqs[0].tokenizer, service.reqs[0].eos_token_ids = None, {9}
    service.start()
    assert service.tap._open["r0"].stops == {7, 9}

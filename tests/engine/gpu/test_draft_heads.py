"""Hidden states of a target that SGLang runs: written where its KV is, as a head reads them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaserve.engine.gpu.draft_heads import SGLangHead, hidden_states_of, keep_states
from adaserve.engine.gpu.model import Inputs
from adaserve.errors import UnsupportedError

SIZE, LAYERS, SLOTS = 8, [1, 2, 4], 30


class Target:
    """What is asked of SGLang's models: a stack that hands out what goes into some layers."""

    config = SimpleNamespace(num_hidden_layers=5)
    capture_aux_hidden_states = False

    def __init__(self) -> None:
        self.model = SimpleNamespace(forward=self._forward, layers_to_capture=[])

    def set_eagle3_layers_to_capture(self, ids: Any) -> None:
        self.model.layers_to_capture, self.capture_aux_hidden_states = LAYERS, True

    def _forward(self, input_ids: Tensor, positions: Tensor, batch: Any, extra: Any = None) -> Any:
        into = [(10 * input_ids[:, None] + layer).expand(-1, SIZE).float() for layer in LAYERS]
        return positions, into


def head(**changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    fc = nn.Linear(len(LAYERS) * SIZE, SIZE, bias=False)
    fc.weight = nn.Parameter(torch.randn(SIZE, len(LAYERS) * SIZE, generator=generator))
    model = {"fc": fc, "input_norm": None, "fc_norm": None, "num_aux_hidden_states": 3,
             "is_mrope_enabled": False, "hidden_size_in": SIZE}  # fmt: skip
    return SimpleNamespace(
        model=SimpleNamespace(
            model=SimpleNamespace(**{**model, **changes}), config=SimpleNamespace(hidden_size=SIZE)
        )
    )


def runner(target: Target, kept: torch.dtype = torch.float32) -> Any:
    pool = SimpleNamespace(k_buffer=[torch.zeros(SLOTS, 2, 4)], dtype=kept)
    return SimpleNamespace(model=target, token_to_kv_pool=pool, dtype=torch.float16)


def test_every_forward_of_the_target_writes_them() -> None:
    target, draft = Target(), head()
    hidden = hidden_states_of(runner(target), draft)
    assert target.capture_aux_hidden_states is False, "the layers above know nothing of it"
    slots, tokens = torch.tensor([3, 29, 7]), torch.tensor([5, 6, 9])
    out = target.model.forward(tokens, torch.arange(3), SimpleNamespace(out_cache_loc=slots), extra=1)
    assert out.tolist() == [0, 1, 2], "what the model goes on with stays as it was"
    joined = torch.cat([10.0 * tokens[:, None] + layer + torch.zeros(3, SIZE) for layer in LAYERS], 1)
    torch.testing.assert_close(hidden.read(slots), joined @ draft.model.model.fc.weight.T)
    hidden.move_kv_cache(torch.tensor([0]), torch.tensor([29]))
    assert torch.equal(hidden.read(torch.tensor([0])), hidden.read(slots[1:2]))
    assert int((hidden.read(torch.arange(SLOTS)).abs().sum(1) > 0).sum()) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"is_mrope_enabled": True}, "multimodal"), ({"hidden_size_in": 16}, "hidden size")],
)
def test_heads_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hidden_states_of(runner(Target()), head(**changes))


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([3, 9, 20, 5], None),
        ([3, 9, 9, 5], "4 rows 3 different tokens of 30"),
        ([3, 9, 30, 5], "4 rows 3 different tokens of 30"),
        ([3, -1, 20, 5], "4 rows 3 different tokens of 30"),
        ([3, 9, 20], "3 rows 3 different tokens of 30"),
    ],
)
def test_each_output_row_of_a_head_needs_a_token_of_its_own(ids: list[int], wrong: str | None) -> None:
    """Of two children with one token both would be accepted, and the answer would get a token too many."""
    draft = head()
    draft.model.hot_token_id = torch.tensor(ids)
    draft.model.config = SimpleNamespace(hidden_size=SIZE, vocab_size=30, draft_vocab_size=4)
    if wrong is None:
        hidden_states_of(runner(Target()), draft)
    else:
        with pytest.raises(ValueError, match=wrong):
            hidden_states_of(runner(Target()), draft)


def test_a_target_with_another_model_inside_is_refused() -> None:
    """Its class has no states that could be read."""
    with pytest.raises(UnsupportedError, match="SimpleNamespace computes in a model inside of it"):
        keep_states(SimpleNamespace(model=SimpleNamespace()), hidden_states_of(runner(Target()), head()))


@pytest.mark.parametrize(
    ("kept", "dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.float16)],
)
def test_hidden_states_are_not_kept_in_eight_bits(kept: torch.dtype, dtype: torch.dtype) -> None:
    assert hidden_states_of(runner(Target(), kept), head()).by_slot.dtype == dtype


@pytest.mark.parametrize(("wanted", "rows"), [(slice(None), 4), (slice(1, None, 2), 2), (slice(0), 0)])
@pytest.mark.parametrize("has_room", [False, True])
def test_logits_are_left_where_there_is_room(
    wanted: slice, rows: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang writes to a room that has just as many rows as there are logits."""

    def logits(ids: Tensor, hidden: Tensor, lm_head: Tensor, metadata: Any) -> Any:
        room, values = metadata.next_token_logits_buffer, hidden @ lm_head
        fits = room is not None and room.shape == values.shape
        return SimpleNamespace(next_token_logits=room.copy_(values) if fits else values)

    states = torch.arange(4.0 * SIZE).view(4, SIZE)
    model = SimpleNamespace(
        model=lambda *_: (states, [2 * states]), lm_head=torch.ones(SIZE, 3), logits_processor=logits
    )
    call = object.__new__(SGLangHead)
    call._runner = SimpleNamespace(model=model, dtype=torch.float32)
    monkeypatch.setattr(SGLangHead, "_around", lambda *_: nullcontext())
    room, none = torch.empty(4, 3) if has_room else None, torch.zeros(4, dtype=torch.int64)
    found = call(Inputs(none, none, none, wanted, states, room), 2, None)  # type: ignore[arg-type]
    assert torch.equal(found.logits, states[wanted] @ model.lm_head) and len(found.logits) == rows
    assert found.states is not None and torch.equal(found.states, 2 * states[wanted])
    if room is not None and rows:
        assert found.logits.data_ptr() == room.data_ptr()

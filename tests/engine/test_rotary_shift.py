"""How far rotary positions of text behind images are from its places (M-RoPE)."""

from types import SimpleNamespace
from typing import Any

import torch

from adaserve.engine.rotary_shift import RotaryShift

TABLE = SimpleNamespace(req_to_token=torch.zeros(4, 9, dtype=torch.int32))


def runner(is_mrope: bool) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(model_is_mrope=is_mrope), req_to_token_pool=TABLE)


def batch(shifts: dict[int, int | None]) -> Any:
    """Prompts by their rows. None: without images."""
    media = [
        d if d is None else SimpleNamespace(mrope_position_delta=torch.tensor([[d]])) for d in shifts.values()
    ]
    rows = torch.tensor(list(shifts))
    return SimpleNamespace(
        reqs=[SimpleNamespace(multimodal_inputs=m) for m in media], req_pool_indices_cpu=rows
    )


def test_each_row_has_that_of_its_last_prompt() -> None:
    shift = RotaryShift.of(runner(is_mrope=True))
    assert shift is not None
    there = shift.by_row  # graphs read this memory
    for prompts, expected in (
        ({1: -90, 3: None}, [0, -90, 0, 0]),
        ({3: 7}, [0, -90, 0, 7]),
        ({1: None, 2: -4}, [0, 0, -4, 7]),
    ):
        shift.start(batch(prompts))
        assert there.tolist() == expected


def test_models_without_mrope_have_none() -> None:
    assert RotaryShift.of(runner(is_mrope=False)) is None

"""Products in 8 bits, which drafts are served with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE, store_again
from adaserve.engine.cpu.linear import draft_storage
from adaserve.engine.cpu.native import NativeBackend
from tests.engine.cpu.factories import Chunk, Pool, hf_model, read_hf, run

BLOCK = 256


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -127 to 127 and what one of them stands for, row by row."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / step.clamp(min=1e-30)), step


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T, by row and block of 256 columns in 8 bits."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for begin in range(0, x.shape[1], BLOCK):
        (q, a), (w, b) = (rounded(t[:, begin : begin + BLOCK]) for t in (x, weight))
        total += (q.double() @ w.double().T) * (a * b.T)
    return total.float()


@pytest.fixture
def llama(flags: tuple[str, ...]) -> LlamaModel:
    weights, config = read_hf(hf_model(hidden_size=600, vocab_size=133))
    model = LlamaModel(weights, config, "int8")
    model.held = NativeBackend(build.load_library(build.build(*flags)), weights, config, "int8")
    return model


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 60, 121])
def test_products_round_by_row_and_block(llama: LlamaModel, rows: int) -> None:
    weight = read_hf(hf_model(hidden_size=600, vocab_size=133))[0].lm_head
    hidden = (
        torch.randn(rows, 600, generator=torch.Generator().manual_seed(rows))
        * torch.logspace(-3, 3, rows)[:, None]
    )
    found, expected = llama.logits(hidden), product(hidden, weight)
    # A number in the middle between two others may be rounded to either: one step of an activation or weight.
    step = 1.5 * expected.abs().amax(-1, keepdim=True) / 127
    assert ((found - expected).abs() <= 0.05 * step).float().mean() > 0.98
    assert ((found - expected).abs() <= step).all()
    exact = hidden @ weight.T
    assert not torch.equal(found, exact)
    assert ((found - exact).norm(dim=-1) < 0.02 * exact.norm(dim=-1)).all()


def test_zeros_and_what_is_no_number(llama: LlamaModel) -> None:
    hidden = torch.zeros(3, 600)
    hidden[1, 5] = torch.nan
    hidden[2, 595] = torch.inf
    found = llama.logits(hidden)
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert found[2].isnan().all()


def test_a_forward_stays_near_that_of_whole_numbers(llama: LlamaModel) -> None:
    weights, config = read_hf(hf_model(hidden_size=600, vocab_size=133))
    whole, tokens = LlamaModel(weights, config, "fp32"), list(range(1, 40))
    found, expected = (
        m.logits(run(m, pool, [Chunk(tokens, list(range(39)), pool.take(39), [])]))
        for m, pool in ((m, Pool(config, 2)) for m in (llama, whole))
    )
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_a_server_says_how_weights_are_stored() -> None:
    weights, config = read_hf(hf_model())
    table = torch.zeros(1, 8, dtype=torch.int32)
    target, draft = (
        CpuForward(LlamaForward(LlamaModel(weights, config, storage), None), table)
        for storage in ("fp32", "int8")  # type: ignore[arg-type]
    )
    theirs = CpuForward(SimpleNamespace(), table)  # type: ignore[arg-type]
    report = CpuDevice(target, draft, theirs).report()
    assert report["weights"] == {"target": "fp32", "drafts": ["int8", "sglang"]}


def test_a_server_says_how_it_has_chosen_to_store_weights() -> None:
    if build.load_kernels() is None:
        pytest.skip("no C compiler here")
    weights, config = read_hf(hf_model())
    table = torch.zeros(1, 8, dtype=torch.int32)

    def stored() -> str:
        return CpuForward(LlamaForward(LlamaModel(weights, config, "auto"), None), table).storage

    assert stored() == "fp16"
    weights = replace(weights, lm_head=weights.lm_head + 1e-7)
    assert stored() == "fp16+fp32"


@pytest.mark.parametrize(
    ("fast", "asked", "stored"),
    [(1, "auto", "int8"), (0, "auto", "fp16"), (0, "int8", "int8"), (1, "bf16", "bf16")],
)
def test_auto_is_int8_where_that_is_fast(
    fast: int, asked: Any, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_kernels", lambda: SimpleNamespace(ada_fast_int8=lambda: fast))
    assert draft_storage(asked, "fp16") == stored


@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_it_is_as_for_the_target_without_kernels(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody is told of 8 bits that nothing holds."""
    monkeypatch.setattr(build, "load_kernels", lambda: None)
    assert draft_storage(asked, "fp32") == "fp32"


def test_a_loaded_model_is_stored_again_once_it_is_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, config = read_hf(hf_model())
    model = SimpleNamespace(**{LLAMA_ATTRIBUTE: LlamaModel(weights, config, "fp32")})
    monkeypatch.setattr("adaserve.engine.cpu.install.read_weights", lambda _: (weights, config))
    llama: LlamaModel = getattr(model, LLAMA_ATTRIBUTE)
    first = llama.held
    store_again(model, "fp32")
    assert llama.held is first
    store_again(model, "int8")
    assert llama.storage == "int8" and llama.held is not first
    # Weights that are learned later are stored alike.
    hidden = torch.randn(2, config.hidden_size)
    assert torch.equal(llama.packed(weights).logits(hidden), llama.logits(hidden))
    store_again(SimpleNamespace(), "int8")

"""The comparison of SGLang's small kernels with torch: here with torch's own operators in their place."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from adaserve.bench.gpu_check import sglang_kernels
from adaserve.bench.gpu_check.sglang_kernels import (
    HEAD_DIM,
    HEADS,
    ROW_BYTES,
    Operators,
    check,
    check_writes,
)

CPU = torch.device("cpu")


def rmsnorm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), epsilon).half()


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual += x
    x.copy_(rmsnorm(residual, weight, epsilon))


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def rope(*, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, is_neox: bool) -> None:
    """By complex numbers: a pair of dimensions is one."""
    assert is_neox
    turn = torch.complex(*cos_sin_cache[positions].chunk(2, dim=-1))[:, None]
    for x in (q, k):
        turned = torch.complex(*x.float().chunk(2, dim=-1)) * turn
        x.copy_(torch.cat((turned.real, turned.imag), dim=-1))


def store_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache[slots], v_cache[slots] = k, v


RIGHT = Operators(rmsnorm, fused_add_rmsnorm, silu_and_mul, rope)


def test_right_operators_pass() -> None:
    found = check(RIGHT, CPU)
    assert [f["name"] for f in found] == list(vars(RIGHT)) and all(f["right"] for f in found), found
    assert check_writes(store_cache, CPU)["right"]


@pytest.mark.parametrize("name", vars(RIGHT))
def test_a_wrong_operator_is_named(name: str) -> None:
    """One that leaves something out: the scale, the sum, the gate, half of the angles."""
    wrong: dict[str, Callable[..., Any]] = {
        "rmsnorm": lambda x, weight, epsilon: x.clone(),
        "fused_add_rmsnorm": lambda x, residual, weight, epsilon: x.copy_(rmsnorm(x, weight, epsilon)),
        "silu_and_mul": lambda x, out: out.copy_(x.chunk(2, dim=-1)[1]),
        "rope": lambda *, q, k, **more: rope(q=q, k=k.clone(), **more),
    }
    found = check(replace(RIGHT, **{name: wrong[name]}), CPU)
    assert [f["name"] for f in found if not f["right"]] == [name]


def test_writes_that_leave_out_a_row_are_wrong() -> None:
    def short(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        store_cache(k[:-1], v[:-1], k_cache, v_cache, slots[:-1])

    assert not check_writes(short, CPU)["right"]


def test_torch_s_operators_are_chosen_for_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of SGLang's own speculation that do not compile must not slow down every server."""
    utils, tree = (
        importlib.import_module(f"sglang.kernels.{n}") for n in ("jit.utils", "ops.speculative.tree")
    )
    asked: list[list[Any]] = []
    monkeypatch.setattr(utils, "parallel_compile", lambda builders: asked.append(list(builders)))
    monkeypatch.setattr(sglang_kernels, "check", lambda *_: [])
    monkeypatch.setattr(sglang_kernels, "check_writes", lambda *_: {})
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fused_add_rmsnorm=None, rmsnorm=None))
    for compared in (sglang_kernels.operators, sglang_kernels.writes):
        compared(CPU)
    assert [tree._jit_tree_module in builders for builders in asked] == [False, True]
    assert [len(builders) for builders in asked] == [3, len(ROW_BYTES) + 1]


def test_what_is_compared_is_what_is_compiled() -> None:
    """Another size would be compiled by the comparison itself."""
    assert 2 * HEADS * HEAD_DIM in ROW_BYTES
    for module, names in {
        "activation.activation": ("activation_module", "silu_and_mul"),
        "attention.clamp_position": ("_jit_clamp_position_module",),
        "attention.rope": ("_jit_fused_rope_module", "apply_rope_with_cos_sin_cache_inplace"),
        "kvcache.kvcache": ("_jit_kvcache_module", "store_cache"),
        "speculative.tree": ("_jit_tree_module",),
    }.items():
        there = importlib.import_module(f"sglang.kernels.ops.{module}")
        assert all(callable(getattr(there, name)) for name in names)

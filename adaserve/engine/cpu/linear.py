"""Linear layers made of torch's own operators, for hosts where the C kernels cannot be built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch.nn import functional

from adaserve.engine.cpu import build

Storage = Literal["auto", "fp32", "fp16", "bf16", "int8"]
"""How weights are stored; int8 is for drafts, and for the C kernels alone."""
STORAGES: tuple[Storage, ...] = get_args(Storage)
Linear = Callable[[torch.Tensor], torch.Tensor]  # fp32 [T, in] -> fp32 [T, out]

STORAGE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def exact_storage(weight: torch.Tensor) -> Storage:
    """The smallest storage that holds every weight without rounding, so that "auto" is exact."""
    weight = weight.detach()
    candidates: tuple[Storage, ...] = ("fp16", "bf16")
    for name in candidates:
        dtype = STORAGE_DTYPES[name]
        if weight.dtype == dtype or torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return name
    return "fp32"


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None, storage: Storage) -> Linear:
    """`x -> x @ weight.T + bias` by the fastest operator this torch build has for the storage."""
    if storage in ("auto", "int8"):
        storage = exact_storage(weight)
    bias = None if bias is None else bias.detach().float()
    if storage == "fp16" and _has_fbgemm():
        return _fbgemm_fp16(weight, bias)
    if storage == "bf16" and _has_fast_bf16():
        return _bf16(weight, bias)
    weight = weight.detach().to(STORAGE_DTYPES[storage]).float().contiguous()
    return _mkldnn(weight, bias) if torch.backends.mkldnn.is_available() else _plain(weight, bias)


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _has_fast_bf16() -> bool:
    # Without the instructions torch emulates bf16 products at a tenth of the fp32 speed.
    return torch.cpu._is_avx512_bf16_supported()


def _fbgemm_fp16(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
    run = torch.ops.quantized.linear_dynamic_fp16
    return lambda x: run(x, packed)


def _bf16(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    stored = weight.detach().bfloat16().contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x.bfloat16(), stored).float()
        return y if bias is None else y + bias

    return run


def _mkldnn(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, bias, "none", [], "")


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def draft_storage(asked: Storage, of_target: Storage) -> Storage:
    """How a draft's weights are stored. A draft may be wrong, so ``auto`` rounds them to 8 bits where the
    processor multiplies such numbers fast. Elsewhere it is as for the target, and so it is in any case
    without the C kernels, which alone hold 8 bits."""
    if asked not in ("auto", "int8"):
        return asked
    kernels = build.load_kernels()
    if kernels is None or (asked == "auto" and not kernels.ada_fast_int8()):
        return of_target
    return "int8"

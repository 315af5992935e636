"""Top-k, top-p and min-p in the C kernels (csrc/filter.h): to sort a vocabulary for each node of a tree takes
longer than the target does."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from adaserve.engine.cpu import build
from adaserve.engine.logits.filters import by_sort


class _Filters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("temperature", "top_p", "min_p", "top_k"))


def by_selection(
    logits: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """A ``Filter`` of fp32 logits. Without kernels it sorts."""
    kernels = build.load_kernels()
    if kernels is None:
        by_sort(logits, at, temperature, top_k, top_p, min_p)
        return
    assert logits.dtype is torch.float32 and logits.is_contiguous()
    at, *settings = (t.contiguous() for t in (at, temperature, top_p, min_p, top_k))
    asked = _Filters(*(t.data_ptr() for t in settings))
    rows, there = (ctypes.c_void_p(t.data_ptr()) for t in (logits, at))
    kernels.ada_filter(rows, logits.shape[1], there, len(at), ctypes.byref(asked), torch.get_num_threads())

"""Marginal pricing in C: what ``scheduler/pricing.py`` says, behind a forward in less of its time."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from adaserve.engine.host.build import load_kernels
from adaserve.scheduler.calibration import CEILING, N_BINS
from adaserve.scheduler.interface import CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.pricing import Priced

_Pointer, _Int, _Double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_double


class _Pricing(ctypes.Structure):
    """``pricing`` of csrc/pricing.h."""

    _fields_ = (
        *((name, _Int) for name in ("rows", "bins", "most")),
        ("ceiling", _Double),
        *((name, _Pointer) for name in ("logprob", "parent", "depth", "row_start")),
        *((name, _Pointer) for name in ("factor", "weight", "cap", "seconds")),
        *((name, _Pointer) for name in ("f", "value", "expected", "counts", "keep")),
        *((name, _Double) for name in ("rate", "price")),
        *((name, _Pointer) for name in ("order", "spare")),
    )


class NativePricing:
    """A ``Pricing`` whose arrays lie at fixed addresses: taking one costs as much as copying into it."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        kernels.ada_price.argtypes, kernels.ada_price.restype = [_Pointer], None
        self._price = kernels.ada_price
        self._call = _Pricing(bins=N_BINS, ceiling=CEILING)
        self._address = ctypes.addressof(self._call)
        self._rows = self._nodes = 0
        self._reserve(64, 1024)

    def _reserve(self, rows: int, nodes: int) -> None:
        self._rows, self._nodes = max(rows, self._rows), max(nodes, self._nodes)
        rows, nodes = self._rows, self._nodes

        def array(name: str, size: int, kind: Any) -> Any:
            made = np.zeros(size, kind)
            setattr(self._call, name, made.ctypes.data)
            return made

        self._logprob, self._parent, self._depth = (
            array(name, nodes, kind)
            for name, kind in (("logprob", np.float64), ("parent", np.int64), ("depth", np.int64))
        )
        self._row_start = array("row_start", rows + 1, np.int64)
        self._factor = array("factor", rows * (N_BINS + 1), np.float64)
        self._weight, self._cap = array("weight", rows, np.float64), np.zeros(rows, np.int64)
        self._seconds = array("seconds", nodes + 1, np.float64)
        self._f, self._value = array("f", nodes, np.float64), array("value", nodes, np.float64)
        self._expected, self._counts = array("expected", rows, np.float64), array("counts", rows, np.int64)
        self._keep = array("keep", nodes, np.bool_)
        self._spare = (array("order", nodes, np.int32), array("spare", nodes, np.int32))

    def __call__(
        self,
        trees: CandidateTrees,
        factors: FloatArray,
        weight: FloatArray,
        cap: IntArray | None,
        seconds: FloatArray,
    ) -> Priced:
        """As ``Pricing`` says."""
        n, m, call = trees.n_rows, trees.n_nodes, self._call
        if n > self._rows or m > self._nodes:
            self._reserve(2 * n, 2 * m)
        call.rows, call.most, call.cap = n, len(seconds) - 1, None
        self._logprob[:m], self._parent[:m] = trees.logprob, trees.parent
        self._row_start[: n + 1], self._weight[:n] = trees.row_start, weight
        self._factor[: factors.size] = factors.reshape(-1)
        self._seconds[: len(seconds)] = seconds
        if cap is not None:
            self._depth[:m], self._cap[:n] = trees.depth, cap
            call.cap = self._cap.ctypes.data
        self._price(self._address)
        return Priced(
            keep=self._keep[:m].copy(),
            counts=self._counts[:n].copy(),
            expected=self._expected[:n].copy(),
            f=self._f[:m].copy(),
            value=self._value[:m].copy(),
            rate=call.rate,
            price=call.price,
        )


def native_pricing() -> NativePricing | None:
    """None where the kernels can't be had: plain Python serves in its place."""
    kernels = load_kernels()
    return None if kernels is None else NativePricing(kernels)

"""Figures per request and per class as arrays: a batch's rows are looked up once and then indexed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adaserve.scheduler.interface import FloatArray, IntArray


class RequestTable:
    """``columns`` floats per request, zero until written. Most batches equal the last one, so the rows of
    the last one are remembered."""

    def __init__(self, columns: int) -> None:
        self.values: FloatArray = np.zeros((64, columns))
        self._row: dict[str, int] = {}
        self._free = list(range(63, -1, -1))
        self._last: tuple[tuple[str, ...], IntArray] = ((), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._row)

    def rows(self, rids: Iterable[str]) -> IntArray:
        """Row of every request in ``values``, [n]; new requests get one."""
        rids = tuple(rids)
        if rids == self._last[0]:
            return self._last[1]
        known = self._row
        for rid in rids:
            if rid not in known:
                if not self._free:
                    self._grow()
                known[rid] = self._free.pop()
        rows = np.fromiter(map(known.__getitem__, rids), np.int64, len(rids))
        self._last = (rids, rows)
        return rows

    def of(self, rids: Iterable[str]) -> FloatArray:
        """Figures of every request, a copy, [n, columns]."""
        rows = self.rows(rids)  # first: new requests may need a larger ``values``
        return self.values[rows]

    def _grow(self) -> None:
        size = len(self.values)
        self.values = np.concatenate([self.values, np.zeros_like(self.values)])
        self._free.extend(range(2 * size - 1, size - 1, -1))

    def forget(self, rid: str) -> None:
        """Clears the request's row, which another request may then get; unknown ids are ignored."""
        if (row := self._row.pop(rid, None)) is not None:
            self.values[row] = 0.0
            self._free.append(row)
            self._last = ((), self._last[1][:0])


class ClassNumbers:
    """Small integers for class names, in order of appearance."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self._last: tuple[tuple[str, ...], IntArray] = ((), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.number)

    def of(self, classes: Iterable[str]) -> IntArray:
        """Number of every row's class, [n]."""
        classes = tuple(classes)
        if classes == self._last[0]:
            return self._last[1]
        known = self.number
        numbers = np.fromiter((known.setdefault(c, len(known)) for c in classes), np.int64, len(classes))
        self._last = (classes, numbers)
        return numbers

"""Figures per request and per class as arrays: a batch's rows are looked up once and then indexed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adaserve.scheduler.interface import FloatArray, IntArray


class NameIds:
    """Small integers for names, from 0 on. Most batches equal the last one, so its numbers are remembered."""

    def __init__(self) -> None:
        self.of_name: dict[str, int] = {}
        self._free: list[int] = []
        self._last: tuple[tuple[str, ...], IntArray] = ((), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.of_name)

    def of(self, names: Iterable[str]) -> IntArray:
        """Number of every name, [n]; new names get one."""
        names = tuple(names)
        if names == self._last[0]:
            return self._last[1]
        known = self.of_name
        for name in names:
            if name not in known:
                known[name] = self._free.pop() if self._free else len(known)
        numbers = np.fromiter(map(known.__getitem__, names), np.int64, len(names))
        self._last = (names, numbers)
        return numbers

    def forget(self, name: str) -> int | None:
        """Its number, which another name may then get; None for a name that has none."""
        number = self.of_name.pop(name, None)
        if number is not None:
            self._free.append(number)
            self._last = ((), self._last[1][:0])
        return number


class Table:
    """``columns`` floats per name, zero until written."""

    def __init__(self, columns: int) -> None:
        self.values: FloatArray = np.zeros((64, columns))
        self._numbers = NameIds()

    def rows(self, names: Iterable[str]) -> IntArray:
        """Row of every name in ``values``, [n]; new names get one."""
        rows = self._numbers.of(names)
        while len(self._numbers) > len(self.values):
            self.values = np.concatenate([self.values, np.zeros_like(self.values)])
        return rows

    def of(self, names: Iterable[str]) -> FloatArray:
        """Figures of every name, a copy, [n, columns]."""
        rows = self.rows(names)  # first: new names may need a larger ``values``
        return self.values[rows]

    def forget(self, name: str) -> None:
        """Clears the name's row; unknown names are ignored."""
        if (row := self._numbers.forget(name)) is not None:
            self.values[row] = 0.0

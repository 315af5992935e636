"""Loops that are compiled: what stands between a draft's candidates and their verification.

A device waits meanwhile. Written with numpy, each of these functions is twenty calls on small arrays, which
take a host several times as long as the work itself. Compiled for the types given, when the module is
imported, and kept on disk; nothing is compiled while requests wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types

Function = TypeVar("Function", bound=Callable[..., Any])


def _array(kind: Any, dimensions: int) -> Any:
    """Of any layout, and not to be written."""
    return types.Array(kind, dimensions, "A", readonly=True)


INTS, FLOATS, BOOLS = (_array(kind, 1) for kind in (types.int64, types.float64, types.boolean))
INT_TABLE, FLOAT_TABLE, BOOL_TABLE = (_array(kind, 2) for kind in (types.int64, types.float64, types.boolean))
INT, FLOAT = types.int64, types.float64
INTS_OUT, BOOLS_OUT = (types.Array(kind, 2, "C") for kind in (types.int64, types.boolean))
"""Tables that are written."""


def compiled(*arguments: Any) -> Callable[[Function], Function]:
    """Compiles a function for arguments of these types."""

    def compile_it(function: Function) -> Function:
        try:
            return cast(Function, njit([arguments], cache=True)(function))
        except Exception:  # nothing can be written, the disk is full, or what is kept there is damaged
            return cast(Function, njit([arguments])(function))

    return compile_it


def several(*kinds: Any) -> Any:
    """A tuple of values of these types."""
    return types.Tuple(kinds)

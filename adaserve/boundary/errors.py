"""The error of a refused request, and how a value is shown in it."""

from __future__ import annotations

from numbers import Integral
from typing import Any

_SHOWN = 40  # characters of a value that an error repeats


class RequestError(ValueError):
    """A request that is refused with HTTP 400. The message names the field and what it accepts."""


class TooLargeError(RequestError):
    """A request with a part that is too large to be judged, let alone served."""


def shown(value: Any) -> str:
    """A short description that never fails, however large, deep or odd ``value`` is."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, Integral):
        # Python refuses to print an integer of more than 4300 digits.
        number = int(value)
        return str(number) if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"

"""Checks of single values; each takes the field's name, the value and the server's limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from adaserve.boundary.errors import RequestError, shown
from adaserve.boundary.limits import INT32_MAX, MAX_ID_CHARACTERS, VALUE_BYTES, Limits
from adaserve.host.files import not_utf8

Check = Callable[[str, Any, Limits], None]


def integer(low: int, high: int = INT32_MAX, *, also: Iterable[int] = ()) -> Check:
    """An integer from ``low`` to ``high``, or one of ``also``."""
    others = frozenset(also)
    extra = "".join(f", or {value}" for value in sorted(others))

    def check(name: str, value: Any, _: Limits) -> None:
        if not is_integer(value) or not (low <= value <= high or value in others):
            raise RequestError(f"{name} must be an integer from {low} to {high}{extra}, got {shown(value)}")

    return check


def number(low: float, high: float) -> Check:
    """A finite number from ``low`` to ``high``."""

    def check(name: str, value: Any, _: Limits) -> None:
        if not is_number(value) or not low <= value <= high:  # a comparison with NaN is false
            raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")

    return check


def finite(name: str, value: Any, _: Limits) -> None:
    """A number that is neither NaN nor infinite."""
    if not is_number(value) or not abs(value) <= sys.float_info.max:  # an integer may be larger
        raise RequestError(f"{name} must be a finite number, got {shown(value)}")


def flag(name: str, value: Any, _: Limits) -> None:
    """true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {shown(value)}")


def text(most: int, *, least: int = 0) -> Check:
    """Text that can be encoded, from ``least`` to ``most`` characters."""

    def check(name: str, value: Any, _: Limits) -> None:
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise RequestError(f"{name} must be text of {least} to {most} characters, got {shown(value)}")
        require_encodable(name, value)

    return check


label = text(MAX_ID_CHARACTERS)


def identifier(name: str, value: Any, limits: Limits) -> None:
    """The name of a request or a session. SGLang logs it as it is, and a line break would begin a line of the
    client's own."""
    text(MAX_ID_CHARACTERS, least=1)(name, value, limits)
    if not value.isprintable():
        raise RequestError(f"{name} may hold printable characters only, got {shown(value)}")


def require_encodable(name: str, value: str) -> None:
    """Raises RequestError for text with half a surrogate pair, which JSON can write and UTF-8 cannot."""
    if not value.isascii() and (odd := not_utf8(value)) is not None:
        raise RequestError(f"{name} holds {odd!r}, which is not a character of UTF-8")


def is_number(value: Any) -> bool:
    """Whether it is a number, and not true or false."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether it is an integer, and not true or false."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def token_ids(name: str, value: Any, limits: Limits) -> None:
    """A list of token ids of the model."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}")
    if not value:
        return
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < limits.vocab_size:
        return  # in C: a prompt may be long
    for i, token in enumerate(value):
        if not is_integer(token) or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"{name}[{i}] must be a token id from 0 to {limits.vocab_size - 1}, got {shown(token)}"
            )


def mapping(name: str, value: Any, _: Limits) -> None:
    """An object with text keys."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"{name} must be an object with text keys, got {shown(value)}")


def known_fields(name: str, value: Any, limits: Limits, known: Mapping[str, Check]) -> None:
    """An object of these fields and no others. Null stands for one that is not set."""
    mapping(name, value, limits)
    for key, item in value.items():
        check = known.get(key)
        if check is None:
            raise RequestError(f"{name} has no field {shown(key)}; it knows {', '.join(known)}")
        if item is not None:
            check(f"{name}.{key}", item, limits)


def absent(why: str) -> Check:
    """Nothing at all: ``why`` says why the field is refused."""

    def check(name: str, value: Any, _: Limits) -> None:
        raise RequestError(f"{name} is refused: {why}")

    return check


def one_or_list(check: Check, most: int) -> Check:
    """One value, or a list of at most ``most``."""

    def every(name: str, value: Any, limits: Limits) -> None:
        if not isinstance(value, list | tuple):
            check(name, value, limits)
            return
        if len(value) > most:
            raise RequestError(f"{name} takes at most {most} entries, got {len(value)}")
        for i, item in enumerate(value):
            check(f"{name}[{i}]", item, limits)

    return every


def size_bytes(value: Any) -> int:
    """A guess of what a JSON value takes: 1 for each character, and ``VALUE_BYTES`` for each value."""
    if isinstance(value, str):
        return VALUE_BYTES + len(value)
    if isinstance(value, Mapping):
        return size_bytes(list(value)) + size_bytes(list(value.values()))
    if not isinstance(value, list | tuple | set | frozenset):
        return VALUE_BYTES
    types, characters = set(map(type, value)), 0
    if types == {str}:
        characters = sum(map(len, value))
    elif not types <= {int, float, bool}:
        return VALUE_BYTES + sum(map(size_bytes, value))
    return VALUE_BYTES * (1 + len(value)) + characters  # mostly in C, as of biases

"""Checks of what a person wrote, by pydantic: one sentence per error, as LoadgenError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

from pydantic import (
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from adaserve.loadgen.errors import LoadgenError

TOO_MUCH = 1e15  # whoever gives more has slipped, and squares of it are still finite
T = TypeVar("T")


def must(what: str) -> WrapValidator:
    """Says ``KEY must WHAT, not VALUE`` of a value that the type or its range refuses."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            kind = error.errors(include_input=False)[0]["type"]
            if kind == "must":
                raise  # an inner rule said it already
            rule = f"be less than {TOO_MUCH:g}" if kind == "less_than" else what
            told = {"rule": rule, "shown": shown(value)}
            raise PydanticCustomError("must", "must {rule}, not {shown}", told) from None

    return WrapValidator(check)


def shown(value: Any) -> str:
    """A value in a message; a number of hundreds of digits helps nobody."""
    text = "a number of very many digits" if type(value) is int and abs(value) > 10**100 else repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


_FINITE = Field(ge=0, lt=TOO_MUCH, allow_inf_nan=False)
Amount = Annotated[float, Strict(), _FINITE, must("be a number of 0 or more")]
Positive = Annotated[float, Strict(), _FINITE, Field(gt=0), must("be a number above 0")]
Rate = Annotated[float, Strict(), _FINITE, must("be a rate of 0 or more requests/s")]
Share = Annotated[float, Strict(), Field(ge=0, le=1), must("be a share from 0 to 1")]
Whole = Annotated[int, Strict(), _FINITE, must("be a whole number of 0 or more")]
Count = Annotated[int, Strict(), _FINITE, Field(ge=1), must("be a whole number of 1 or more")]
Flag = Annotated[bool, Strict(), must("be true or false")]
Text = Annotated[str, Strict(), Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$"), must("be text in one line")]


class Checked:
    """Refuses keys that do not exist: a typo must not pass silently."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        given = data.kwargs if isinstance(data, ArgsKwargs) else data
        if not isinstance(given, Mapping | None | cls):
            raise LoadgenError(f"expected keys and values, not {shown(data)}")
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(map(str, given)) - set(known)) if isinstance(given, Mapping) else []
        if unknown:
            raise LoadgenError(f"unknown key {unknown[0]!r}: known are {', '.join(known)}")
        return data


@dataclass_transform(frozen_default=True)
def checked(cls: type[T]) -> type[T]:
    """A frozen dataclass that checks what it is made of. Raises LoadgenError."""
    made: Any = dataclass(cls, frozen=True, config=ConfigDict(extra="ignore"))  # type: ignore[call-overload]
    validated = made.__init__

    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            validated(self, *args, **values)
        except ValidationError as error:
            raise LoadgenError(_sentence(error)) from None

    made.__init__ = init
    return cast(type[T], made)


def _sentence(error: ValidationError) -> str:
    """The first error: where, and what is wrong."""
    first = error.errors(include_input=False)[0]
    where = ": ".join(map(str, first["loc"]))
    if first["type"] == "must":
        return f"{where} {first['msg']}"
    text = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    return f"{where}: {text}" if where else text

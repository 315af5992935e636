"""The kinds of values in a load test's configuration: what is accepted, and how the error says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from adaserve.checked import Checked, shown
from adaserve.loadgen.errors import LoadgenError

TOO_MUCH = 1e15  # more than this is a typo; its square is still finite


class Setting(Checked):
    """A part of the configuration. Raises LoadgenError."""

    refusal = LoadgenError

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        """A typo must not pass silently."""
        if not isinstance(data, Mapping | cls):
            raise LoadgenError(f"expected keys and values, not {shown(data)}")
        known = list(cls.model_fields)
        unknown = sorted(set(map(str, data)) - set(known)) if isinstance(data, Mapping) else []
        if unknown:
            raise LoadgenError(f"unknown key {unknown[0]!r}: known are {', '.join(known)}")
        return data


def must(what: str) -> WrapValidator:
    """Says ``KEY must WHAT, not VALUE`` of a value that the type or its range refuses."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            kind = error.errors(include_input=False)[0]["type"]
            if kind == "value_error":
                raise  # an inner rule said it already
            rule = f"be less than {TOO_MUCH:g}" if kind == "less_than" else what
            raise ValueError(f"must {rule}, not {shown(value)}") from None

    return WrapValidator(check)


_FINITE = Field(ge=0, lt=TOO_MUCH)
Amount = Annotated[float, _FINITE, must("be a number of 0 or more")]
Positive = Annotated[float, _FINITE, Field(gt=0), must("be a number above 0")]
Rate = Annotated[float, _FINITE, must("be a rate of 0 or more requests/s")]
Share = Annotated[float, Field(ge=0, le=1), must("be a share from 0 to 1")]
Whole = Annotated[int, _FINITE, must("be a whole number of 0 or more")]
Count = Annotated[int, _FINITE, Field(ge=1), must("be a whole number of 1 or more")]
Flag = Annotated[bool, must("be true or false")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$"), must("be text in one line")]

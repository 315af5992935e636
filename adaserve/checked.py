"""Values that people write by hand: pydantic checks them, and errors are one sentence."""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Checked(BaseModel):
    """A frozen record whose fields are checked; unknown ones are refused.

    Raises ``refusal`` with the first problem: which field, its value, and what is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    refusal: ClassVar[type[ValueError]] = ValueError

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self.refusal(_sentence(error, list(type(self).model_fields))) from None

    def changed(self, **values: Any) -> Self:
        """A copy with other values, checked again. Raises ``refusal``."""
        return type(self)(**{**dict(self), **values})


_IN_FILES = {
    "dict_type": "it should be a mapping",
    "model_type": "it should be a mapping",
    "frozen_set_type": "it should be a list",
}
"""By the type of an error, where pydantic names a class of Python's, or of ours."""


def _sentence(error: ValidationError, known: list[str]) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {where!r}: known are {', '.join(known)}"
    if problem["type"] == "value_error":  # raised by a validator of ours, which says what is accepted
        text = str(problem["ctx"]["error"])
        return (" " if text.startswith(("is ", "must ")) else ": ").join(filter(None, (where, text)))
    expected = _IN_FILES.get(problem["type"]) or problem["msg"].replace("Input", "it", 1)
    return f"{where} is {shown(problem['input'])}: {expected}"


_BRIEF = reprlib.Repr()  # of a value that a client sends, however long or deep
_BRIEF.maxstring = _BRIEF.maxother = 1000
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxfrozenset = _BRIEF.maxdict = 60


def shown(value: Any) -> str:
    """A value for an error message, at most 60 characters."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # an int with thousands of digits cannot be printed
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."

"""The fuzzer combines legal values of every field that the boundary lets through."""

from __future__ import annotations

from typing import Any

import pytest

from adaserve.boundary import Limits, RequestError
from adaserve.boundary.request import EACH, WHOLE
from adaserve.boundary.sampling import FIELDS
from tests.engine.fuzzing import LEGAL, LEGAL_SAMPLING
from tests.engine.pairs import VOCAB

ELSEWHERE = {"text", "sampling_params", "custom_logit_processor"}
"""Drawn as prompts, from their own table, and by tests of their own."""
LIMITS = Limits(VOCAB, labels=frozenset({"tenant", "model_name"}))


def is_refused(check: Any) -> bool:
    with pytest.raises(RequestError) as refused:
        check("field", object(), LIMITS)
    return "is refused" in str(refused.value)


@pytest.mark.parametrize(("table", "checks"), [(LEGAL, {**EACH, **WHOLE}), (LEGAL_SAMPLING, FIELDS)])
def test_every_field_has_values_that_are_let_through(table: Any, checks: Any) -> None:
    taken = {name for name, check in checks.items() if name not in ELSEWHERE and not is_refused(check)}
    assert taken - table.keys() == set(), "fields that nobody combines with others"
    for name in taken:
        for value in table[name]:
            checks[name](name, value, LIMITS)

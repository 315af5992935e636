"""A parser that takes long is given up; one that only waited is not."""

from __future__ import annotations

import re
import time

import pytest

from adaserve.boundary import RequestError
from adaserve.patches import parsing_time
from adaserve.patches.parsing_time import _limited


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing_time, "PATIENCE_S", 0.05)


def endless(text: str) -> object:
    """A search that would take years, in a parser that catches what goes wrong."""
    try:
        return re.match("(a+)+b", text)
    except Exception:
        return "caught"


def test_a_search_that_takes_long_is_given_up() -> None:
    with pytest.raises(RequestError, match="given up"):
        _limited(endless, "a" * 60)


def test_what_is_short_or_only_waits_is_not() -> None:
    assert _limited(lambda text: text.upper(), "a") == "A"
    _limited(time.sleep, 0.1)
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:  # no timer is left behind
        pass

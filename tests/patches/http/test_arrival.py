"""When a request came, whatever its body states."""

from __future__ import annotations

import pytest

from adaserve.patches.http.validation import BELIEVED_DELAY_S, arrival

NOW = 5000.0


@pytest.mark.parametrize("stated", [-1.7e308, -1.0, 1e-9, NOW - 2 * BELIEVED_DELAY_S])
def test_nobody_gains_more_than_the_delay_that_is_believed(stated: float) -> None:
    assert arrival(stated, NOW) == NOW - BELIEVED_DELAY_S


@pytest.mark.parametrize("stated", [NOW + 1, 1.7e308])
def test_nobody_comes_later_than_now(stated: float) -> None:
    assert arrival(stated, NOW) == NOW


def test_routes_that_stamp_requests_themselves_are_believed() -> None:
    assert arrival(NOW - 0.3, NOW) == NOW - 0.3 and arrival(None, NOW) == NOW

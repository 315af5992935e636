"""What prompts are expected to add to a verification before any was served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.costs.prefills import LearnedPrefills
from tests.engine.admission.test_forecaster import ALONE


@pytest.mark.parametrize(("token_s", "added_s"), [(0.001, 1.025), (0.0, 0.0011)])
def test_the_first_guess_is_what_was_measured_and_never_nothing(token_s: float, added_s: float) -> None:
    """On a busy host a forward of many tokens may seem to take no longer than one of a few."""
    costs = LearnedCosts(LatencyModel(ForwardCost(0.001), ForwardCost(0.010, per_token_s=token_s)))
    pacer = PrefillPacer(AdaServeConfig(), costs, SimpleNamespace(), {}, ALONE)  # type: ignore[arg-type]
    assert pacer._beside.seconds(int(LearnedPrefills.FAR)) == pytest.approx(added_s, rel=0.1)

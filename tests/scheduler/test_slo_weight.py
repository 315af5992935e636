"""Weights of requests: who hangs in the balance counts most, who is safe or lost hardly more than 1."""

from __future__ import annotations

import numpy as np
import pytest
from sched_factories import running

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.slo_weight import attainment_weight


@pytest.mark.parametrize(
    ("period_s", "pace", "g"),
    [
        (0.05, 1.0, 1.0),  # 20 iterations for 20 tokens
        (0.05, 2.0, 0.3792),  # 0.6 x 20 / sqrt(33) = 2.09 deviations above: exp(-(2.09 / 1.5)^2 / 2)
        (0.1, 1.0, 0.0245),  # 10 / sqrt(17) = 2.43 deviations below: exp(-(2.43 - 0.5)^2)
        (0.1, 2.0, 1.0),  # enough with all that speculation brings, too little with 0.6 of it
        (0.1, 3.0, 0.949),
        (0.0, 1.0, 0.0),
    ],
)  # fmt: skip
def test_weights_follow_the_formula(period_s: float, pace: float, g: float) -> None:
    """20 tokens are left, and one second until the last of them is due."""
    config = PolicyConfig(attain_weight=3.0)
    batch = running(1, tpot_slo_s=0.05, decoded_tokens=10, remaining_tokens=20)
    weight = attainment_weight(batch, 0.5, period_s, np.array([pace]), config)
    assert weight == pytest.approx([1 + 3 * g], abs=2e-3)


def test_nobody_counts_less_than_one_and_the_horizon_is_the_end() -> None:
    batch = running(
        4, tpot_slo_s=np.array([np.inf, 0.05, 0.05, 0.05]), decode_start_s=np.array([9.5, 0.0, 9.5, 9.5]),
        remaining_tokens=np.array([20, 20, 96, 10_000]),
    )  # fmt: skip
    no_slo, late, near, far = attainment_weight(batch, 10.0, 0.06, np.full(4, 1.2), PolicyConfig())
    assert no_slo == late == 1.0 and near == far > 1.5

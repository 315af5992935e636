"""What one more token is worth to a request whose SLO is judged at its end."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import FloatArray, RunningBatch

NO_SLO_S = 1e6
"""An SLO that no request misses, seconds per token."""


def attainment_weight(
    running: RunningBatch, now_s: float, period_s: float, pace: FloatArray, config: PolicyConfig
) -> FloatArray:
    """Weights, [n].

    With L tokens left (at most ``horizon_tokens``), D seconds until the SLO of the last of them, m = D /
    period iterations left and a = ``pace`` tokens per iteration, z is the surplus of tokens in standard
    deviations. The weight is 1 + attain_weight * g with g the sensitivity of the attainment to one more
    token: small when safe, 1 when it hangs in the balance, falling off when lost.

    Without weights verify tokens go to the requests that are easiest to draft for, and those that are hard
    fall behind their SLO.
    """
    left = np.minimum(running.tokens_ahead, config.horizon_tokens)
    elapsed = np.maximum(now_s - running.decode_start_s, 0.0)
    # A request without SLO has all the time in the world: it comes out as safe.
    due = np.minimum(running.tpot_slo_s, NO_SLO_S) * (running.decoded_tokens + left) - elapsed
    m = np.maximum(due, 0.0)
    m /= max(period_s, 1e-6)
    spread = np.sqrt(1.6 * m + 1.0)
    without = (m - left) / spread
    speculated = m * (pace - 1.0) / spread
    safe = without + 0.6 * speculated
    lost = np.minimum(without + speculated + 0.5, 0.0)
    g: FloatArray = np.exp(np.where(safe > 0, safe * safe * (-1.0 / 4.5), -lost * lost))
    return 1.0 + config.attain_weight * g

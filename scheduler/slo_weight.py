"""The worth of one more token to a request whose SLO is judged at its end."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import FloatArray, RunningBatch

NO_SLO_S = 1e6
"""An SLO that no request misses, seconds per token."""

VARIANCE = 1.6
"""Variance of the tokens that one iteration yields for a request."""

COUNTED_ON = 0.6
"""A request is safe if it reaches its SLO with this share of the tokens that speculation should yield."""

NOT_LOST = 0.5
"""Standard deviations below its SLO from which on a request is being lost."""

SAFE_WIDTH = 1.5
"""Standard deviations above its SLO at which one more token is worth exp(-1/2) of its largest worth."""


def attainment_weight(
    running: RunningBatch, now_s: float, period_s: float, pace: FloatArray, config: PolicyConfig
) -> FloatArray:
    """Weights, [n].

    With L tokens left (at most ``horizon_tokens``), D seconds until the SLO of the last of them and a =
    ``pace`` tokens per iteration, m = D / period iterations are left. They yield m tokens without
    speculation, and m (a - 1) more with it. The surplus over L, in standard deviations, is computed twice:
    with ``COUNTED_ON`` of the latter it says how safe the request is, and with all of them how
    lost. The weight is 1 + attain_weight * g, where g is the sensitivity of the attainment to one more token:
    small when the request is safe, 1 when it could go either way, falling off when it is lost. The constants
    are ours. Without weights verified tokens go to the requests that are easiest to draft for, and the hard
    ones fall behind their SLO.
    """
    left = np.minimum(running.tokens_ahead, config.horizon_tokens)
    elapsed = np.maximum(now_s - running.decode_start_s, 0.0)
    # A request without SLO has all the time in the world: it comes out as safe.
    due = np.minimum(running.tpot_slo_s, NO_SLO_S) * (running.decoded_tokens + left) - elapsed
    m = np.maximum(due, 0.0)
    m /= max(period_s, 1e-6)
    deviation = np.sqrt(VARIANCE * m + 1.0)
    without = (m - left) / deviation
    speculated = m * (pace - 1.0) / deviation
    safe = without + COUNTED_ON * speculated
    lost = np.minimum(without + speculated + NOT_LOST, 0.0)
    g: FloatArray = np.exp(np.where(safe > 0, safe * safe * (-0.5 / SAFE_WIDTH**2), -lost * lost))
    return 1.0 + config.attain_weight * g

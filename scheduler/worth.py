"""What one more token is worth to a request whose SLO is judged at its end."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import BoolArray, FloatArray, RunningBatch


def attainment_weight(
    running: RunningBatch, now_s: float, period_s: float, pace: FloatArray, config: PolicyConfig
) -> tuple[FloatArray, BoolArray]:
    """Weights [n] and a mask [n] of requests that can't be saved.

    With L tokens left (at most ``horizon_tokens``), D seconds until the SLO of the last of them, m = D /
    period iterations left and a = ``pace`` tokens per iteration, z is the surplus of tokens in standard
    deviations. The weight is 1 + attain_weight * g with g the sensitivity of the attainment to one more
    token: small when safe, 1 when it hangs in the balance, falling off when lost.
    """
    left = np.minimum(running.remaining_tokens, config.horizon_tokens).astype(np.float64)
    elapsed = np.maximum(0.0, now_s - running.decode_start_s)
    with_slo = np.isfinite(running.tpot_slo_s)
    slo = np.where(with_slo, running.tpot_slo_s, 0.0)
    due = slo * (running.decoded_tokens + left) - elapsed
    m = np.maximum(due, 0.0) / max(period_s, 1e-6)
    spread = np.sqrt(1.6 * m + 1.0)
    safe = (m * (1.0 + 0.6 * (pace - 1.0)) - left) / spread
    central = (m * pace - left) / spread
    lost = np.exp(-((np.minimum(central + 0.5, 0.0)) ** 2))
    g = np.where(safe > 0, np.exp(-(safe**2) / 4.5), np.where(central > -0.5, 1.0, lost))
    g = np.where(with_slo, g, 0.0)
    hopeless = with_slo & ((due <= 0) | (left > config.triage_ratio * pace * m))
    return 1.0 + config.attain_weight * g, hopeless

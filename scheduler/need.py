"""What a request needs: A(r) of AdaServe section 3, and the checks around it."""

from __future__ import annotations

import math

import numpy as np

from adaserve.scheduler.interface import FloatArray, IntArray, RunningBatch


def check_batch(running: RunningBatch) -> None:
    """Raises ValueError on an empty batch, duplicate rids or NaN; called once per plan."""
    n = len(running)
    if n == 0:
        raise ValueError("plan() needs at least one running request; skip the iteration instead")
    if len(set(running.rids)) != n:
        twice = sorted({rid for rid in running.rids if running.rids.count(rid) > 1})
        raise ValueError(f"duplicate request ids in one batch: {twice[:4]}; every row needs its own rid")
    # A minimum is NaN as soon as one entry is.
    if math.isnan(running.tpot_slo_s.min()) or math.isnan(running.decode_start_s.min()):
        raise ValueError("tpot_slo_s and decode_start_s must not be NaN; use inf for a request without SLO")


def need_tokens(running: RunningBatch, now_s: float, t_spec_s: float) -> FloatArray:
    """``A(r) = (l + t_spec) / t_TPOT - o`` (AdaServe section 3, before Eq. 3), shape [n], not capped.

    1 or less: the token that every iteration yields suffices. An SLO of inf gives ``-o``; an SLO of
    0 or less can't be met and gives +inf (capped by A_cap later). A clock that went backwards counts
    as no time elapsed.
    """
    elapsed = np.maximum(now_s - running.decode_start_s, 0.0)
    elapsed += t_spec_s
    slo = running.tpot_slo_s
    need: FloatArray = np.full(len(running), np.inf)
    np.divide(elapsed, slo, out=need, where=slo > 0)
    need -= running.decoded_tokens
    return need


def depth_cap(running: RunningBatch) -> IntArray:
    """Deepest node worth keeping per row, [n]: a path of k nodes emits up to k + 1 tokens."""
    cap: IntArray = np.maximum(np.minimum(running.max_depth, running.remaining_tokens - 1), 0)
    return cap

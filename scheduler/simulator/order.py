"""Which running requests take part in an iteration: the paper's continuous-batching schedulers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.interface import Context, FloatArray, IntArray
from adaserve.scheduler.simulator.rows import Rows

RowOrder = Callable[[Rows, float], IntArray | None]
"""(running requests, present time in seconds) -> the rows that decode; None = all."""

FCFS_BATCH = 32


def fcfs(rows: Rows, now_s: float) -> IntArray | None:
    """FCFS (v1 ablation): the oldest ``FCFS_BATCH`` requests decode, the others wait."""
    if len(rows) <= FCFS_BATCH:
        return None
    arrivals = np.array([r.arrival_s for r in rows.requests])
    return np.sort(np.argsort(arrivals, kind="stable")[:FCFS_BATCH])


def stta(latency: LatencyModel) -> RowOrder:
    """STTA (v1 ablation), as we read it: the shortest time to attain first, preempting the others.

    Requests in order of the deadline of their next token; the batch grows while its iteration still
    ends before the earliest such deadline. At least one request always runs; late ones don't shrink it.
    """

    def choose(rows: Rows, now_s: float) -> IntArray | None:
        n, deadline = len(rows), next_token_deadline(rows)
        order = np.argsort(deadline, kind="stable")
        deadline = deadline[order]
        ahead = deadline[deadline > now_s + latency.verify_s(1.0)]
        if not len(ahead):
            return None
        context = Context(float((rows.prompt + rows.decoded).sum()), n)
        cost = latency.verify_s(np.arange(1, n + 1, dtype=np.float64), context)
        fits = int(np.count_nonzero(now_s + cost <= ahead[0]))
        return np.sort(order[: max(1, fits)])

    return choose


def next_token_deadline(rows: Rows) -> FloatArray:
    """start + SLO x (o + 1): when the next token is due, [n] seconds."""
    out: FloatArray = rows.start + np.where(np.isfinite(rows.slo), rows.slo, 1e6) * (rows.decoded + 1)
    return out


def separate_pipelines(rows: Rows, now_s: float) -> IntArray | None:
    """SepPipe (v1 ablation): iterations of one class each; the class with the most urgent request next."""
    if len(set(rows.classes)) <= 1:
        return None
    urgent = int(np.argmin(next_token_deadline(rows)))
    mine = rows.classes[urgent]
    return np.array([i for i, c in enumerate(rows.classes) if c == mine])


ROW_ORDERS = ("fcfs", "stta", "sep-pipe")


def build_order(name: str, latency: LatencyModel) -> RowOrder | None:
    """A row order by name; None for any other policy, under which all rows decode."""
    orders = (fcfs, stta(latency), separate_pipelines)
    return dict(zip(ROW_ORDERS, orders, strict=True)).get(name)

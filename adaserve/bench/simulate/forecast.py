"""``adaserve simulate forecast``: predicted against delivered TPOT, and what could be known at best."""

from __future__ import annotations

import numpy as np

from adaserve.bench.simulate.hardware import Hardware
from adaserve.bench.simulate.server_defaults import server_defaults
from adaserve.scheduler.simulator.forecast_accuracy import CLOSE, close_share, predict_requests
from adaserve.scheduler.simulator.workload import TextModel, make_requests
from adaserve.slo.classes import SLOConfig
from adaserve.slo.trace import Trace


def forecast_text(
    trace: Trace, hardware: Hardware, policy: str, text: TextModel, skip: int, seed: int
) -> str:
    """Serves the trace on one replica as a server does; the first ``skip`` requests are not judged.

    Raises ValueError when none is left, the policy is unknown or the model does not fit, SLOError on an
    unknown class."""
    latency = hardware.latency()
    requests = make_requests(trace, SLOConfig(), latency.baseline_s(), text, seed)
    config = server_defaults(policy, latency, seed, hardware.kv_tokens(), hardware.on_cpu())
    judged = predict_requests(requests, config)[skip:]
    if not judged:
        raise ValueError(f"no request is left after the first {skip}: skip fewer, or give a longer trace")
    delivered = np.array([r.delivered_s for r in judged])
    told = {
        "load": [r.by_load_s for r in judged],
        "server": [r.predicted_s for r in judged],
        "foreseen": [r.foreseen_s for r in judged],
    }
    lines = [f"{len(judged)} requests, {trace.rps:.2f} requests/s, policy {policy}"]
    lines.append(f"TPOT within {CLOSE:.0%} of delivered, and median error:")
    for name, values in told.items():
        if np.isnan(values).all():
            lines.append(f"  {name:9s} nothing: each request ran alone")
            continue
        error = float(np.nanmedian(np.array(values) / delivered)) - 1
        lines.append(f"  {name:9s} {close_share(values, delivered):6.1%}   {error:+.1%}")
    return "\n".join(lines)

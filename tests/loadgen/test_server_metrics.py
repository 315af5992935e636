"""What a load test reads of a server's Prometheus endpoint."""

from __future__ import annotations

from adaserve.loadgen.server_metrics import learning, parse_metrics

METRICS = """
adaserve:draft_accepted{draft="present",slo_class="chat",model_name="m"} 1.5
adaserve:draft_accepted{slo_class="chat",draft="first"} 1.25
adaserve:draft_swaps 3
"""


def test_what_drafts_that_learn_gain_is_found() -> None:
    assert learning(parse_metrics(METRICS)) == {"chat": {"present": 1.5, "first": 1.25}}
    assert learning(parse_metrics("adaserve:draft_swaps 0\n")) is None

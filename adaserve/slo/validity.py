"""Whether a load test is valid: whether it offered the load that it claims, and measured it in time."""

from __future__ import annotations

MAX_LAG_P99_MS = 10.0
"""A load test whose requests left later than this (p99) did not offer the load it claims."""
MAX_READ_LAG_MS = 50.0
"""A load generator that is later than this (p99) to read what has arrived is slower than the server: several
chunks of a stream then wait for it at a time, and the kernel tells only when the last of them came."""
INTERRUPTED = "the run was interrupted"
"""Why a run is not valid whose user ended it."""


def invalid_reasons(sent: int, interrupted: bool, lag_p99_ms: float | None) -> list[str]:
    """Why a run is not valid; empty if it is. ``lag_p99_ms``: the p99 of the requests' dispatch lag."""
    reasons = []
    if not sent:
        reasons.append("no request was sent")
    if lag_p99_ms is not None and lag_p99_ms > MAX_LAG_P99_MS:
        reasons.append(
            f"requests left late: p99 of the dispatch lag is {lag_p99_ms:.1f} ms, the limit is "
            f"{MAX_LAG_P99_MS:g} ms (use fewer requests/s, more processes or a less busy machine)"
        )
    if interrupted:
        reasons.append(INTERRUPTED)
    return reasons


def read_too_late(lag_p99_ms: float | None) -> list[str]:
    """The same for a load generator that was too late to read what had arrived."""
    if lag_p99_ms is None or lag_p99_ms <= MAX_READ_LAG_MS:
        return []
    return [
        f"answers were read late: p99 of the load generator's own lag is {lag_p99_ms:.0f} ms, the limit is "
        f"{MAX_READ_LAG_MS:g} ms (use fewer streams at a time, more processes or a less busy machine)"
    ]

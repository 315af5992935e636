"""Limits the share of the time for which one tenant's SLOs may hold up the prompts of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from adaserve.scheduler.interface import FloatArray


def binding_rows(slack_s: FloatArray, tpot_slo_s: FloatArray) -> list[int]:
    """Rows that prompts wait for: the one with the least slack and the one with the tightest SLO, [<= 2].

    Both arrays [n]; inf = nothing is at stake for the row."""
    least = {int(np.argmin(values)) for values in (slack_s, tpot_slo_s) if np.isfinite(values).any()}
    return sorted(least)


@dataclass
class HoldBudget:
    """A token bucket per tenant: ``share`` seconds of credit per second, at most ``most_s`` of it.

    A tenant pays a second for each second in which a prompt of another waits because of its SLOs. While it
    has no credit, its SLOs hold no prompt up.
    """

    share: float  # 1 = no limit
    most_s: float
    _credit: dict[str, tuple[float, float]] = field(default_factory=dict)  # tenant -> credit, as of when

    @property
    def limits(self) -> bool:
        return self.share < 1

    def has(self, tenant: str, now_s: float) -> bool:
        """Whether the tenant's SLOs still count."""
        return not self.limits or self._left_s(tenant, now_s) > 0

    def charge(self, tenants: Iterable[str], seconds: float, now_s: float) -> None:
        """Charges the tenants for having held somebody up for so long until now. Nobody owes more than
        ``most_s``: a server that was stopped for an hour has not been held up by its tenants."""
        for tenant in tenants:
            self._credit[tenant] = (max(self._left_s(tenant, now_s) - seconds, -self.most_s), now_s)
        # Tenants with full credit need not be remembered, so the table stays as small as the traffic.
        for tenant in [t for t in self._credit if self._left_s(t, now_s) >= self.most_s]:
            del self._credit[tenant]

    def _left_s(self, tenant: str, now_s: float) -> float:
        credit_s, at_s = self._credit.get(tenant, (self.most_s, now_s))
        return min(self.most_s, credit_s + self.share * (now_s - at_s))

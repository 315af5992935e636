"""What finished requests got, as an anchor for what the next one will get.

A request lives longer than the load that it meets: by its end others have come and gone, so the state of the
batch at its arrival says only half of it. The other half is what requests of its class got lately, whose text
and load were like those to come. Of requests with milliseconds of their own those count that stated about as
many; if there were none, all of them.
"""

from __future__ import annotations

import math

from adaserve.slo.classes import SLO

NEWEST = 0.1
"""Weight of the request that finished last. Before there were 1 / NEWEST of them all weigh the same: the
first one met an idle server."""

LOAD_SHARE = 0.5
"""How far a prediction follows the load away from the usual one, in logarithms: 1 would be the load alone, 0
the past alone. With 0.3 predictions are a little better, but routers need the load."""

FADES_S = 10.0
"""Without requests that finish, the past counts less and less; this is the time constant."""

MIN_TOKENS = 8
"""The TPOT of a shorter answer says little."""


class DeliveredTPOT:
    """Mean TPOT by kind of request and by class, and what the load alone had predicted for the same ones."""

    def __init__(self) -> None:
        # How many, and means of the logarithms: of what was delivered, and of what the load alone said.
        self._means: dict[str, tuple[int, float, float]] = {}
        self._last_s = -math.inf

    def add(self, slo: SLO, tokens: int, tpot_s: float, by_load_s: float, now_s: float) -> None:
        """A request has finished. ``by_load_s``: the TPOT that the load alone predicted at its arrival."""
        if tokens < MIN_TOKENS or tpot_s <= 0 or by_load_s <= 0:
            return
        got, said = math.log(tpot_s), math.log(by_load_s)
        for kind in {slo.kind, slo.slo_class}:
            count, usual_got, usual_said = self._means.get(kind, (0, got, said))
            newest = max(NEWEST, 1 / (count + 1))
            self._means[kind] = (
                count + 1,
                usual_got + newest * (got - usual_got),
                usual_said + newest * (said - usual_said),
            )
        self._last_s = now_s

    def predict(self, slo: SLO, by_load_s: float, now_s: float) -> float:
        """The TPOT of one more request for which the load alone predicts ``by_load_s``."""
        known = self._means.get(slo.kind) or self._means.get(slo.slo_class)
        if known is None:
            return by_load_s
        _, usual_got, usual_said = known
        past = (1.0 - LOAD_SHARE) * math.exp(-max(0.0, now_s - self._last_s) / FADES_S)
        return math.exp(usual_got + (1.0 - past) * (math.log(by_load_s) - usual_said))

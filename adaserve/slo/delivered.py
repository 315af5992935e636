"""What finished requests got, as an anchor for what the next one will get.

A request lives longer than the load that it meets: by its end others have come and gone, so the state of the
batch at its arrival says only half of it. The other half is what requests of its class got lately, whose text
and load were like those to come. Requests with milliseconds of their own are all of one class, but are served
at the speeds that they ask for: what counts is what those got that asked for about as much.
"""

from __future__ import annotations

import math

from adaserve.slo.classes import CUSTOM_CLASS, SLO

NEWEST = 0.1
"""Weight of the request that finished last."""

LOAD_SHARE = 0.5
"""How far a prediction follows the load away from the usual one, in logarithms: 1 would be the load alone, 0
the past alone. With 0.3 predictions are a little better, but routers need the load."""

FADES_S = 10.0
"""Without requests that finish, the past counts less and less; this is the time constant."""

LEAST_TOKENS = 8
"""The TPOT of a shorter answer says little."""


BANDS = 2
"""Of TPOT SLOs, in an octave."""

_Kind = tuple[str, int | None]


def _kinds(slo: SLO) -> list[_Kind]:
    """As what such requests are remembered, the closest first: class and band."""
    kinds: list[_Kind] = [(slo.slo_class, None)]
    if slo.slo_class == CUSTOM_CLASS and math.isfinite(slo.tpot_s):
        kinds.insert(0, (CUSTOM_CLASS, round(BANDS * math.log2(slo.tpot_s))))
    return kinds


class DeliveredTPOT:
    """Mean TPOT of requests that are alike, and what the load alone had predicted for them."""

    def __init__(self) -> None:
        self._means: dict[_Kind, tuple[float, float]] = {}  # of the logarithms: delivered, by the load alone
        self._last_s = -math.inf

    def add(self, slo: SLO, tokens: int, tpot_s: float, by_load_s: float, now_s: float) -> None:
        """A request has finished. ``by_load_s``: the TPOT that the load alone predicted at its arrival."""
        if tokens < LEAST_TOKENS or tpot_s <= 0 or by_load_s <= 0:
            return
        got, said = math.log(tpot_s), math.log(by_load_s)
        for kind in _kinds(slo):
            usual_got, usual_said = self._means.get(kind, (got, said))
            self._means[kind] = (
                usual_got + NEWEST * (got - usual_got),
                usual_said + NEWEST * (said - usual_said),
            )
        self._last_s = now_s

    def predict(self, slo: SLO, by_load_s: float, now_s: float) -> float:
        """The TPOT of one more request for which the load alone predicts ``by_load_s``."""
        known = next((means for kind in _kinds(slo) if (means := self._means.get(kind))), None)
        if known is None:
            return by_load_s
        usual_got, usual_said = known
        past = (1.0 - LOAD_SHARE) * math.exp(-max(0.0, now_s - self._last_s) / FADES_S)
        return math.exp(usual_got + (1.0 - past) * (math.log(by_load_s) - usual_said))

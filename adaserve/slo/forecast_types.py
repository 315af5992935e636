"""What a server says that one more request would get: gauges, and the ``slo`` section of ``/v1/loads``."""

from __future__ import annotations

import msgspec


class ClassForecast(msgspec.Struct):
    """One more request of a class."""

    tpot_ms: float  # predicted
    headroom: float | None  # SLO / predicted TPOT; None without a TPOT SLO
    wait_ms: float  # predicted, until its prefill starts; 0 = at once


class Forecast(msgspec.Struct):
    """All classes, as seen from the queue and the batch of one scheduler."""

    admission_open: float  # 0 to 1; below 1 a prompt that can wait does, for the sake of those that run
    classes: dict[str, ClassForecast]

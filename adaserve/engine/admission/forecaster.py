"""What one more request would get: the engine's side of ``scheduler/admission/prediction.py``.

Nothing here runs in a decode iteration. A forecast is made at most once a second, and when the server becomes
idle or busy; when a request arrives, its TPOT is predicted in addition.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.patches.scheduler.worker_interface import Load
from adaserve.scheduler.admission.prediction import predicted_wait_s
from adaserve.scheduler.admission.situation import Situation, WaitingBatch, prefill_s
from adaserve.scheduler.averages import MovingAverage
from adaserve.scheduler.interface import FloatArray
from adaserve.slo.classes import SLO, SLOConfig, kind_of
from adaserve.slo.forecast_types import ClassForecast, Forecast
from adaserve.slo.ledger import SLOLedger

MIN_AGE_S = 1.0
"""A forecast is kept this long."""

PROMPT_TOKENS = 256.0
"""Length of a prompt, before one was seen."""


class Forecaster:
    """Says what one more request would get."""

    def __init__(self, pacer: PrefillPacer, ledger: SLOLedger, classes: SLOConfig) -> None:
        self._pacer, self._ledger, self._classes = pacer, ledger, classes
        self._prompt_tokens = MovingAverage(0.1, start=PROMPT_TOKENS)
        self._made_s = -np.inf
        self._idle = False
        self.latest: Forecast | None = None

    def is_due(self, idle: bool, now_s: float) -> bool:
        """Whether the latest forecast is too old, or was made before the server became idle."""
        return now_s - self._made_s >= MIN_AGE_S or idle != self._idle

    def arrived(self, req: Any, load: Load) -> None:
        """Predicts the TPOT of a request that is about to be queued, to be compared with what it gets."""
        self._prompt_tokens.add(float(len(req.origin_input_ids)))
        self._ledger.predict(req, self._by_load_s(self._ledger.slo(req), load))

    def renew(self, load: Load, now_s: float) -> Forecast:
        """Makes a forecast and publishes it."""
        self._made_s, self._idle = now_s, not (load.running or load.joining)
        situation, finish_s = self._situation(load, now_s)
        stakes, rows = situation.interference.stakes, situation.waiting.prompt_left
        open_to = 1.0
        if load.paced and situation.config.gate is not None:
            left = np.append(rows, round(self._prompt_tokens.value))
            prefills_s = float(
                prefill_s(left, situation.interference).sum() + situation.waiting.encode_s.sum()
            )
            open_to = min(1.0, stakes.headroom(len(left), prefills_s) / situation.config.gate)
        told, waits = {}, {}
        for name in self._classes.labels:
            slo = self._slo(name)
            tpot_s = self._ledger.delivered.predict(slo, self._by_load_s(slo, load), now_s)
            headroom = slo.tpot_s / tpot_s if math.isfinite(slo.tpot_s) else None
            alike = slo.ttft_s, headroom is None  # all that a prompt's place in the queue depends on
            if alike not in waits:
                waits[alike] = self._wait_s(slo, self._prompt_tokens.value, situation, finish_s, load)
            told[name] = ClassForecast(tpot_s * 1e3, headroom, waits[alike] * 1e3)
        self.latest = Forecast(open_to, told)
        self._ledger.stats.forecast(self.latest)
        return self.latest

    def wait_s(self, req: Any, load: Load, now_s: float) -> float:
        """Predicted seconds from now until the prefill of a request that arrives now starts."""
        situation, finish_s = self._situation(load, now_s)
        tokens = float(len(req.origin_input_ids))
        return self._wait_s(self._ledger.slo(req), tokens, situation, finish_s, load)

    def _by_load_s(self, slo: SLO, load: Load) -> float:
        """TPOT of one more request if the load stays as it is."""
        predictor = self._pacer.predictor
        return predictor.tpot_s(
            slo.kind, predictor.with_one_more(len(load.running), load.joining, load.slots)
        )

    def _slo(self, name: str) -> SLO:
        known = name in self._classes.classes
        return self._classes.get(name).slo(self._ledger.baseline_s) if known else SLO(name)

    def _situation(self, load: Load, now_s: float) -> tuple[Situation, FloatArray]:
        """The state of queue and batch, and the seconds until each running request ends, rising."""
        view, predictor = self._pacer.view(load, now_s), self._pacer.predictor
        situation, batch = view.situation, view.batch
        if not load.paced:
            situation = replace(situation, config=replace(situation.config, gate=None, pacing="fixed"))
        n = len(load.running)
        kinds = map(kind_of, batch.slo_class, batch.tpot_slo_s.tolist())
        pace = np.array([predictor.pace(kind, n) for kind in kinds])
        finish_s: FloatArray = np.sort(batch.tokens_ahead * predictor.cycle_s(n) / pace)
        return situation, finish_s

    def _wait_s(
        self, slo: SLO, tokens: float, situation: Situation, finish_s: FloatArray, load: Load
    ) -> float:
        queue = situation.waiting
        rows = len(queue.arrival_s)
        # Prompts that were not looked at are like those that were.
        unseen = (load.joining - rows) / rows if rows else 0.0
        with_it = WaitingBatch(
            arrival_s=np.append(queue.arrival_s, situation.now_s),
            ttft_slo_s=np.append(queue.ttft_slo_s, slo.ttft_s),
            prompt_left=np.append(np.round(queue.prompt_left * (1.0 + unseen)), max(1.0, tokens)).astype(
                np.int64
            ),
            started=np.append(queue.started, False),
            tpot_slo_s=np.append(queue.tpot_slo_s, slo.tpot_s),
            encode_s=np.append(queue.encode_s, 0.0),
        )
        slots = load.slots - (load.joining - rows)
        return predicted_wait_s(replace(situation, waiting=with_it), finish_s, slots)

"""The requests that a worker serves, from their first prefill until they end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

from adaserve.engine.request_state import RequestState
from adaserve.noise import request_key
from adaserve.slo.classes import SLO
from adaserve.slo.ledger import asked_of


class Requests:
    """Their states by row of SGLang's request pool.

    A retraction gives a request's row to another one. What has to outlast it, its clock and its noise, is
    kept until the request ends.
    """

    def __init__(self, seed: tuple[int, int]) -> None:
        """``seed``: of the requests' noise."""
        self.states: dict[int, RequestState] = {}  # by pool row
        self._row: dict[str, int] = {}  # by rid, of requests that have not ended
        self._seed = seed
        self._started = 0
        self._decode_starts: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._keys: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __contains__(self, rid: str) -> bool:
        return rid in self._row

    def at(self, rows: Sequence[int]) -> list[RequestState]:
        return [self.states[row] for row in rows]

    def start(
        self, req: Any, row: int, token: int, slo: SLO, now_s: float
    ) -> tuple[RequestState, str | None]:
        """The state of a request that was prefilled, and the id of one that has lost its row to it.

        ``token``: what the prefill has drawn.
        """
        asked, generated = asked_of(req), [*req.output_ids, token]
        if not req.output_ids:  # else it was retracted, and its clock goes on
            self._decode_starts[req] = now_s
        state = RequestState(
            req.rid,
            slo.slo_class,
            slo.tpot_s,
            decode_start_s=self._decode_starts.get(req, now_s),
            decoded=len(generated) - 1,
            generated=generated,
            key=self._key(req),
            speculation=asked.speculation,
            osl=asked.osl,
            learn=asked.learn,
            prompt_tokens=len(req.origin_input_ids),
        )
        old, lost = self.states.get(row), None
        if old is not None and old.rid != req.rid and self._row.get(old.rid) == row:
            # It has ended (SGLang does not report one that is aborted in the queue) or waits again.
            del self._row[old.rid]
            lost = old.rid
        self.states[row], self._row[req.rid] = state, row
        return state, lost

    def end(self, rid: str) -> int | None:
        """The row that the request had; None if it has lost it."""
        return self._row.pop(rid, None)

    def number(self, number: int) -> int:
        """The next request to be prefilled has this number, and the noise of the one that had it before.
        Returns the key of that noise."""
        self._started = number - 1
        return request_key(*self._seed, number)

    def _key(self, req: Any) -> int:
        """Of the request's noise: by its number in the order of first prefills, so that text at a fixed seed
        does not depend on chunks. After a retraction it goes on with the same noise, but after a token that
        the new prefill has drawn."""
        if req not in self._keys:
            self._started += 1
            self._keys[req] = request_key(*self._seed, self._started)
        return self._keys[req]


def tokens_of(req: Any, ids: Iterable[int]) -> list[int]:
    """``ids`` of one of SGLang's requests. In place of images, audio and video SGLang has hashes, which are
    no tokens: token 0 stands there."""
    if req.multimodal_inputs is None:
        return list(ids)
    return [token if token < MM_PAD_SHIFT_VALUE else 0 for token in ids]


def rows_of_pool(batch: Any) -> np.ndarray:
    """int64 [n]: every request's row of the request pool, from the host's own copy."""
    return batch.req_pool_indices_cpu.numpy()

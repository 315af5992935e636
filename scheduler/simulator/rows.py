"""The decoding requests of one replica as arrays, so that a batch costs a few numpy calls."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray, RunningBatch
from adaserve.scheduler.simulator.workload import SimRequest
from adaserve.slo.lengths import OutputLengths

NO_LIMIT = 1 << 20


class Rows:
    """Parallel arrays over running requests; requests join and leave between iterations."""

    def __init__(self, lengths: OutputLengths) -> None:
        """``lengths``: of the answers that have ended."""
        self._lengths = lengths
        self.requests: list[SimRequest] = []
        self.decoded: IntArray = np.zeros(0, np.int64)
        self.iterations: IntArray = np.zeros(0, np.int64)
        self.max_depth: IntArray = np.zeros(0, np.int64)
        self._rebuild()

    def __len__(self) -> int:
        return len(self.requests)

    def _rebuild(self) -> None:
        rs = self.requests
        self.rids = tuple(r.rid for r in rs)
        self.classes = tuple(r.slo_class for r in rs)
        self.slo: FloatArray = np.array([r.tpot_slo_s for r in rs])
        self.start: FloatArray = np.array([r.first_token_s for r in rs])
        self.prompt: IntArray = np.array([r.prompt_tokens for r in rs], np.int64)
        self.length: IntArray = np.array([r.output_tokens - 1 for r in rs], np.int64)
        self.limit: IntArray = np.array([r.cap_tokens - 1 for r in rs], np.int64)
        self.difficulty: FloatArray = np.array([r.difficulty for r in rs])
        self.bias: FloatArray = np.array([r.bias for r in rs])

    def join(self, requests: list[SimRequest]) -> None:
        """Adds requests whose first token is out."""
        zeros = np.zeros(len(requests), np.int64)
        self.requests.extend(requests)
        self.decoded = np.concatenate([self.decoded, zeros])
        self.iterations = np.concatenate([self.iterations, zeros])
        depths = np.array([NO_LIMIT if r.drafts else 0 for r in requests], np.int64)
        self.max_depth = np.concatenate([self.max_depth, depths])
        self._rebuild()

    def advance(self, pick: slice | IntArray, new: IntArray) -> list[tuple[SimRequest, int, int]]:
        """An iteration brought ``new`` tokens to the rows ``pick``. Removes those that are done, and returns
        each with its tokens and iterations."""
        self.decoded[pick] += new
        self.iterations[pick] += 1
        over = self.decoded >= self.length
        if not over.any():
            return []
        ended = [
            (self.requests[i], int(self.decoded[i]), int(self.iterations[i])) for i in np.flatnonzero(over)
        ]
        self._keep(~over)
        return ended

    def _keep(self, these: BoolArray) -> None:
        self.requests = [r for r, stays in zip(self.requests, these.tolist(), strict=True) if stays]
        self.decoded, self.iterations = self.decoded[these], self.iterations[these]
        self.max_depth = self.max_depth[these]
        self._rebuild()

    def batch(self, at: IntArray | None, prefill_tokens: int) -> RunningBatch:
        """The batch a policy sees; ``at`` picks rows, None = all."""
        if at is None:
            rids, classes, pick = self.rids, self.classes, slice(None)
        else:
            rids = tuple(self.rids[i] for i in at)
            classes = tuple(self.classes[i] for i in at)
            pick = at  # type: ignore[assignment]
        done = self.decoded[pick].copy()  # an outcome that is looked at later has it as it was
        remaining, likely = np.maximum(1, self.limit[pick] - done), None
        if self._lengths:
            left = [self._lengths.left(name, d) for name, d in zip(classes, done.tolist(), strict=True)]
            likely = np.minimum(remaining, np.array(left, np.int64))
        return RunningBatch(
            rids=rids,
            slo_class=classes,
            tpot_slo_s=self.slo[pick],
            decode_start_s=self.start[pick],
            decoded_tokens=done,
            context_tokens=self.prompt[pick] + done,
            remaining_tokens=remaining,
            max_depth=self.max_depth[pick],
            temperature=np.ones(len(rids)),
            prefill_tokens=prefill_tokens,
            likely_tokens=likely,
        )

"""Trains a draft on what was served, and judges it on what was served since.

Online Speculative Decoding (arXiv:2310.07177), Algorithm 1, with a replay buffer, home data and a gate:
requests are first used to compare the candidate, which has not seen them, with the draft that is served, and
only then trained on.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.learning import losses
from adaserve.learning.draft import DraftCopy
from adaserve.learning.records import Record
from adaserve.noise import gumbel

INTERVAL = 8
"""Requests of an update."""
JUDGED = 32
"""Requests that a candidate is judged on. They are trained on afterwards."""
REPLAYED, HOME = 0.5, 0.25
"""Earlier requests and home texts of an update, as shares of its new requests."""
WARM_UP, CLIP, BETAS = 10, 1.0, (0.9, 0.95)
TOKENS_AT_ONCE = 1024
HARD_TAU, HARD_NOISE = 0.55, 0.95
"""How a draft's logits and the shared noise are read (adaserve/pair/acceptance.py), for the hard loss."""

Pause = Callable[[], None]
"""Called between small pieces of work: waits while the server needs the processor."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Expected accepted tokens of a chain of 4, of three drafts on the same requests."""

    candidate: float
    present: float
    first: float
    verdict: str  # "better", "worse" or "undecided"


@dataclass
class Replay:
    """The newest requests, up to some memory."""

    most_bytes: int
    records: deque[Record] = field(default_factory=deque)
    nbytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.nbytes += record.nbytes
        while self.nbytes > self.most_bytes:
            self.nbytes -= self.records.popleft().nbytes


class Trainer:
    """One draft and all that it learns from. ``loss``: a name of ``losses.LOSSES``, or "hard"."""

    def __init__(
        self, draft: DraftCopy, home: Sequence[Record], *, loss: str, rate: float, replay_bytes: int
    ) -> None:
        self.draft, self._home, self._loss, self._rate = draft, list(home), loss, rate
        self.first = draft.state()
        self.present = self.first  # what is served
        self.replay = Replay(replay_bytes)
        self.requests = self.tokens = self.updates = 0
        self._random = random.Random(0)
        self.restart()

    def restart(self) -> None:
        """From the weights that are served, forgetting where the optimizer was going."""
        self.draft.load(self.present)
        self._optimizer = torch.optim.AdamW(self.draft.weights, lr=self._rate, betas=BETAS, weight_decay=0.0)
        self._steps = 0

    # -- learning -----------------------------------------------------------------------------

    def learn(self, fresh: Sequence[Record], pause: Pause) -> None:
        """Updates on new requests, ``INTERVAL`` at a time; each has earlier ones and home texts beside it."""
        for start in range(0, len(fresh), INTERVAL):
            new = list(fresh[start : start + INTERVAL])
            earlier = _some(self._random, self.replay.records, round(REPLAYED * len(new)))
            home = _some(self._random, self._home, round(HOME * len(new)))
            self._update([*new, *earlier, *home], pause)
            for record in new:
                self.replay.add(record)
            self.requests += len(new)
            self.tokens += sum(map(len, new))

    def _update(self, records: Sequence[Record], pause: Pause) -> None:
        positions = sum(map(len, records))
        for part in _parts(records):
            pause()
            loss = self._loss_sum(part) / positions
            loss.backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / WARM_UP)
        torch.nn.utils.clip_grad_norm_(self.draft.weights, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1

    def _loss_sum(self, records: Sequence[Record]) -> Tensor:
        every = zip(records, self.draft.logits(records), strict=True)
        return torch.stack([self._loss_on(r, logits).sum() for r, logits in every]).sum()

    def _loss_on(self, record: Record, logits: Tensor) -> Tensor:
        if self._loss == "hard" and record.key:
            return _hard(record, logits)
        p, q = distributions(record, logits)
        kind = losses.LOSSES["forward" if self._loss == "hard" else self._loss]
        return losses.loss_of(kind, p, q, greedy=record.temperature == 0)

    # -- judging ------------------------------------------------------------------------------

    def judge(self, unseen: Sequence[Record], pause: Pause) -> Judgement:
        """Compares three drafts on requests that none was trained on.

        The candidate is better when its mean gain is larger than the standard error of that mean, over
        requests, and worse when it is below by twice as much or not a number.
        """
        candidate = self.draft.state()
        master = {name: t.clone() for name, t in self.draft.model.state_dict().items()}
        try:
            new = self._scores(candidate, unseen, pause)
            present = self._scores(self.present, unseen, pause)
            first = present if self.present is self.first else self._scores(self.first, unseen, pause)
        finally:
            self.draft.model.load_state_dict(master)
        means = (float(new.mean()), float(present.mean()), float(first.mean()))
        return Judgement(*means, verdict(new - present))

    @torch.no_grad()
    def _scores(self, state: Mapping[str, Tensor], records: Sequence[Record], pause: Pause) -> Tensor:
        """[n]: expected accepted tokens of a draft on each request, in the order of ``_parts``."""
        self.draft.load(state)
        scores: list[float] = []
        for part in _parts(records):
            pause()
            for record, logits in zip(part, self.draft.logits(part), strict=True):
                p, q = distributions(record, logits)
                accepted = losses.acceptance(p, q, greedy=record.temperature == 0)
                scores.append(losses.expected_accepted(accepted))
        return torch.tensor(scores)


def verdict(gains: Tensor) -> str:
    """Of gains [n] on n requests."""
    mean = float(gains.mean())
    error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    if not math.isfinite(mean) or mean < -2 * error:
        return "worse"
    return "better" if mean > error else "undecided"


def distributions(record: Record, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(target, draft): log-probabilities over the same outcomes, at the request's temperature."""
    q = fn.log_softmax(logits / (record.temperature or 1.0), dim=-1)
    p = torch.from_numpy(record.logprobs.astype("float32"))
    if record.ids is None:
        return fn.log_softmax(p, dim=-1), q  # rounding to float16 has moved the sum
    ids = torch.from_numpy(record.ids.astype("int64"))
    return losses.with_rest(p), losses.coarse(q, ids)


def _hard(record: Record, logits: Tensor) -> Tensor:
    n = len(record)
    token = torch.from_numpy(record.tokens[record.start + 1 : record.start + 1 + n].astype("int64"))
    greedy = record.temperature == 0
    noise = torch.zeros(1)
    if not greedy:
        keys, at = np.full(n, record.key, np.uint64), np.arange(record.start, record.start + n)
        noise = torch.from_numpy(gumbel(keys, at, logits.shape[1]))
    tau = losses.SHARPENED if greedy else HARD_TAU
    return losses.hard_loss(logits, token, noise, tau, 0.0 if greedy else HARD_NOISE)


def _parts(records: Sequence[Record]) -> list[list[Record]]:
    """Groups of similar length and bounded size, so that padding is little and pauses are short."""
    parts: list[list[Record]] = []
    for record in sorted(records, key=lambda r: r.start + len(r)):
        longest = record.start + len(record)
        if parts and longest * (len(parts[-1]) + 1) <= TOKENS_AT_ONCE:
            parts[-1].append(record)
        else:
            parts.append([record])
    return parts


def _some(rng: random.Random, records: Sequence[Record], count: int) -> list[Record]:
    return rng.sample(list(records), min(count, len(records)))

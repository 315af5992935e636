"""Trains a draft on what was served, and judges it on what was served since.

Online Speculative Decoding (arXiv:2310.07177), Algorithm 1, but at all positions and not at errors alone, and
with earlier requests, rehearsal data and a gate: requests are first used to compare the candidate, which has
not seen them, with the draft that is served, and only then trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from adaserve.sharpening import Correction, DraftSharpening
from adaserve.trainer import losses, sharpening_fit
from adaserve.trainer.draft import DraftCopy
from adaserve.trainer.draft_head import HeadCopy
from adaserve.trainer.judging import Judgement, Snapshot, verdict
from adaserve.trainer.records import Newest, Record

JUDGED = 32
"""Requests that a candidate is judged on. They are trained on afterwards."""
WORSE = 2
"""Judgements in a row that find the draft in training worse, after which it starts again, or that find the
present draft worse than the first one, which then serves again. One may be due to what its requests happen to
be about."""
JUDGE_EVERY = 2
"""Rounds of ``JUDGED`` requests: judging costs as much as half a round of training."""
FITTED = 16
"""Requests that the reading of a candidate is fitted to, the newest that it was trained on."""
STEP_WEIGHT = 0.8
"""Of each step's loss, as a share of the one before: a later step is reached less often."""
WARM_UP, CLIP, BETAS = 10, 1.0, (0.9, 0.95)
TOKENS_AT_ONCE = 1024

Pause = Callable[[], None]
"""Called between small pieces of work: waits while the server needs the processor."""


class Recipe(msgspec.Struct, frozen=True):
    """How a draft is trained."""

    loss: str = "jsd"  # a name of `losses.LOSSES`, or "hard"
    rate: float = 6e-4  # of AdamW
    ema: float = 0.98  # decay of the average of the weights, over updates
    interval: int = 8  # new requests of an update; at most ``JUDGED``, which a round has
    replayed: float = 0.5  # earlier requests of an update, for each new one
    rehearsal: float = 0.25  # rehearsal texts of an update, for each new request


class Trainer:
    """One draft and all that it learns from. ``sharpening``: how the first draft is read."""

    def __init__(
        self,
        draft: DraftCopy | HeadCopy,
        rehearsal: Sequence[Record],
        recipe: Recipe,
        *,
        sharpening: DraftSharpening,
        replay_bytes: int,
    ) -> None:
        assert recipe.interval <= JUDGED, "a round has no more requests, so an update cannot either"
        self.draft, self.rehearsal, self.recipe, self.sharpening = draft, list(rehearsal), recipe, sharpening
        self.first = Snapshot(draft.state(), Correction())
        self.present = self.first  # what is served
        self.replay = Newest(replay_bytes)
        self.requests = self.tokens = self.updates = 0
        self._rounds = self._worse = self._behind = 0
        self._random = random.Random(0)
        self.restart()

    def restart(self) -> None:
        """From the weights that are served, forgetting where the optimizer was going."""
        self.draft.load(self.present.state)
        self._average = [w.detach().clone() for w in self.draft.weights]
        rate = self.recipe.rate
        self._optimizer = torch.optim.AdamW(self.draft.weights, lr=rate, betas=BETAS, weight_decay=0.0)
        self._steps = self._worse = 0

    def round(self, unseen: Sequence[Record], judged: Callable[[Judgement], bool], pause: Pause) -> None:
        """Learns from new requests. Every second round they are first used to judge the draft in training:
        ``judged`` is called with the result, and returns whether a better candidate serves from now on.
        """
        self._rounds += 1
        if self._rounds % JUDGE_EVERY == 0:
            found = self._or_first(self.judge(unseen, pause))
            self._worse = self._worse + 1 if found.verdict == "worse" else 0
            taken = judged(found)
            if taken:
                self.present, self._behind = found.draft, 0
            if found.returns or (found.wins and not taken) or self._worse == WORSE:
                self.restart()
        self.learn(unseen, pause)

    def _or_first(self, found: Judgement) -> Judgement:
        """The first draft in place of the candidate, where the present one has fallen behind it and the
        candidate has not caught up: what was learned may be wrong for what is asked now."""
        self._behind = self._behind + 1 if verdict(found.first - found.present) == "better" else 0
        if self._behind < WORSE or found.candidate.mean() >= found.first.mean():
            return found
        self._behind = 0
        return replace(found, draft=self.first, candidate=found.first, returns=True)

    # -- learning -----------------------------------------------------------------------------

    def learn(self, fresh: Sequence[Record], pause: Pause) -> None:
        """Updates on new requests; each update has earlier ones and rehearsal texts beside it."""
        recipe = self.recipe
        for start in range(0, len(fresh), recipe.interval):
            new = list(fresh[start : start + recipe.interval])
            earlier = _some(self._random, self.replay.records, round(recipe.replayed * len(new)))
            rehearsal = _some(self._random, self.rehearsal, round(recipe.rehearsal * len(new)))
            self._update([*new, *earlier, *rehearsal], pause)
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
            group["lr"] = self.recipe.rate * min(1.0, self._steps / WARM_UP)
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(self.draft.weights, CLIP)):
            self._optimizer.step()
            self._average_weights()
            self.updates += 1
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _average_weights(self) -> None:
        """Their exponential moving average is what is judged and served: single updates are noisy."""
        decay = min(self.recipe.ema, self._steps / (self._steps + WARM_UP))
        for average, weight in zip(self._average, self.draft.weights, strict=True):
            average.lerp_(weight, 1 - decay)

    def _loss_sum(self, records: Sequence[Record]) -> Tensor:
        steps = []
        for number, said in enumerate(self.draft.unrolled(records)):
            every = [self.loss_on(r, logits).sum() for r, logits in zip(records, said, strict=True)]
            steps.append(STEP_WEIGHT**number * torch.stack(every).sum())
        return torch.stack(steps).sum()

    def loss_on(self, record: Record, logits: Tensor) -> Tensor:
        """[n]: of a draft that says ``logits`` [n, vocab] at the record's positions."""
        if self.recipe.loss == "hard" and record.key:
            return _hard(record, logits, self.sharpening)
        p = sharpening_fit.target(record, logits.device)
        q = sharpening_fit.draft(record, logits, record.temperature or 1.0)
        kind = losses.LOSSES["forward" if self.recipe.loss == "hard" else self.recipe.loss]
        return losses.loss_of(kind, p, q, greedy=record.temperature == 0)

    # -- judging ------------------------------------------------------------------------------

    def judge(self, unseen: Sequence[Record], pause: Pause) -> Judgement:
        """Compares three drafts on requests that none was trained on, each read as it would be served.

        The candidate is better when its mean gain is larger than ``SURE`` standard errors of that mean, over
        requests (more of them with few requests, by Student's t), and worse when it is as far below 0, or not
        a number.
        """
        master = {name: t.clone() for name, t in self.draft.model.state_dict().items()}
        try:
            candidate = self.snapshot(pause)
            new = self.scores(candidate, unseen, pause)
            present = self.scores(self.present, unseen, pause)
            first = present if self.present is self.first else self.scores(self.first, unseen, pause)
        finally:
            self.draft.model.load_state_dict(master)
        return Judgement(candidate, new, present, first, tuple(r.slo_class for r in unseen))

    @torch.no_grad()
    def snapshot(self, pause: Pause) -> Snapshot:
        """The average of the draft in training, rounded, and its reading. The draft in training is lost."""
        for weight, average in zip(self.draft.weights, self._average, strict=True):
            weight.copy_(average)
        state = self.draft.state()
        self.draft.load(state)
        newest = list(self.replay.records)[-FITTED:]
        logits: list[Tensor] = []
        for record in newest:
            pause()
            logits += self.draft.logits([record])
        return Snapshot(state, sharpening_fit.fit(newest, logits, self.sharpening, self.present.correction))

    @torch.no_grad()
    def scores(self, draft: Snapshot, records: Sequence[Record], pause: Pause) -> Tensor:
        """[n]: expected accepted tokens of a chain of 4 on each request. The draft in training is lost."""
        self.draft.load(draft.state)
        sharpening = self.sharpening.corrected(draft.correction)
        found: dict[int, float] = {}
        for part in _parts(records):
            pause()
            for record, logits in zip(part, self.draft.logits(part), strict=True):
                accepted = sharpening_fit.accepted(record, logits, sharpening)
                found[id(record)] = losses.expected_accepted(accepted)
        return torch.tensor([found[id(r)] for r in records])


def _hard(record: Record, logits: Tensor, sharpening: DraftSharpening) -> Tensor:
    scale, spread = map(float, sharpening.with_shared_noise(record.temperature))
    noise, device = logits.new_zeros(1), logits.device
    if record.temperature > 0:
        noise = sharpening_fit.noise(record, logits.shape[1], device)
    loss = losses.hard_loss(logits, sharpening_fit.served(record, device), noise, 1 / scale, spread / scale)
    return loss * sharpening_fit.knows_served(record, logits)


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

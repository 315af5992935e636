"""The server's part of a draft that learns: hands over records, swaps better drafts in, reports progress."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaserve.config import AdaServeConfig
from adaserve.engine.learning.swap import Swap, require_fit
from adaserve.engine.learning.tap import Tap
from adaserve.engine.learning.trainer_link import TrainerLink
from adaserve.engine.request_state import RequestState
from adaserve.engine.sources.beam import BeamSource
from adaserve.errors import UnsupportedError
from adaserve.sharpening import DraftSharpening
from adaserve.slo.events import DraftLearning, Judged
from adaserve.slo.stats import SLOStats, epoch_s
from adaserve.trainer.draft import File, checked, shapes_of
from adaserve.trainer.messages import Answer, Candidate, Hello, Message, Progress
from adaserve.trainer.versions import DamagedError, Versions

logger = logging.getLogger(__name__)

LOOK_S = 0.25
MANY = 50_000_000
UPDATE_S = 4.8e-7
"""Of one thread of a CPU for an update, for each parameter: worked out, not measured, from 4,000 tokens, six
operations for each, and 50 billion operations per second. With ``MANY`` parameters it is 24 s."""
MAX_JUDGED = 64
"""Judgements that are remembered for the operator."""
HEADER_BYTES = 1 << 20
"""Of a safetensors file, at the most."""
TIGHT = 0.9
"""The trainer waits while a running request has used more than this share of the time that its SLO allows."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """What is exchanged: weights, and how logits are read."""

    weights: Any  # as of the ``Swap``
    sharpening: DraftSharpening


@dataclass(frozen=True, slots=True)
class _Offer:
    """A candidate that is made ready beside the iterations."""

    candidate: Candidate
    ready: Future[tuple[Any, File]]


class Learner:
    """Owns the line to the trainer, which the ``tap`` feeds; exchanges the draft's weights and how they are
    read.

    ``weights``: of the draft; ``source`` drafts with them. ``folder``: of its checkpoint. ``vocabulary``: the
    target's tokens. ``target``, where the draft is a head: the target's checkpoint.
    """

    def __init__(
        self,
        config: AdaServeConfig,
        tap: Tap,
        weights: Swap,
        source: BeamSource,
        folder: str,
        stats: SLOStats,
        vocabulary: int,
        target: str | None,
    ) -> None:
        require_learnable(weights.model, folder, target)
        warn_of_slow_training(config.learn_device, list(weights.model.parameters()))
        if config.learn_folder is not None:  # while what is wrong with it can still be said
            versions = Versions(Path(config.learn_folder))
            versions.claim()
            try:
                versions.current(folder)
            except DamagedError as error:
                logger.warning("AdaServe: %s, so the draft starts from its original weights", error)
        self._tap, self._weights, self._source, self._stats = tap, weights, source, stats
        known = None if target is not None else known_tokens(weights.model, vocabulary)
        self.link = TrainerLink(config, folder, bytes_of(folder, target), vocabulary, known, target)
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}  # what a candidate must look like
        self._looked_s = 0.0
        self._first = self._serving()
        self._learned: _Draft | None = None  # while the first draft serves instead
        self._held = False
        self._present: tuple[Candidate, File] | None = None  # for a trainer that starts again
        self._offer: _Offer | None = None
        self._helper = ThreadPoolExecutor(1, "adaserve-draft")
        self.state = DraftLearning(trainer="starting")
        self._before = (0, 0, 0)  # requests, tokens and updates of trainers that have ended

    def serve(self, name: str) -> None:
        """For comparisons, from the next iteration on: serves the "first" draft, while nothing is recorded
        but the trainer goes on with what it has; or the present one "held", while the trainer waits as well.
        "present" goes back to normal."""
        if self._offer is not None:
            wait([self._offer.ready])  # it is read into the weights that would change under it
        if name == "first" and self._learned is None:
            self._learned = self._serving()
            self._exchange(self._first)
        elif name != "first" and self._learned is not None:
            self._exchange(self._learned)
            self._learned = None
        self._held = name == "held"
        self._tap.pauses = name != "present"

    def look(self, states: Iterable[RequestState], now_s: float) -> None:
        """Called between two iterations, or while nothing runs: tells the trainer whether to wait, and reads
        its messages."""
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        busy = self._held or is_tight(states, now_s)
        for message in self.link.look(busy, now_s, self._present):
            self.take_in(message)
        if self._tap.ring is not self.link.ring:  # a trainer has ended, or another one was started
            self._tap.ring, self._offer = self.link.ring, None
            self._before = self.state.requests, self.state.tokens, self.state.updates
            gone = "ended" if self.link.is_over else "restarting"
            self.state.trainer = gone if self.link.ring is None else "starting"
        elif self.link.is_over:  # also where none could be started
            self.state.trainer = "ended"
        if self._offer is not None and not self._held and self._offer.ready.done():
            self._swap(self._offer)
        self._report()

    def take_in(self, message: Message) -> None:
        """What the trainer says."""
        if isinstance(message, Hello):
            self.tensors = message.tensors
            self.state.trainer = "running"
        elif isinstance(message, Progress):
            self._judged(message)
        elif isinstance(message, Candidate):
            assert self.link.weights is not None
            shared = np.frombuffer(self.link.weights, np.uint8)[: message.size]
            self._offer = _Offer(message, self._helper.submit(self._prepared, shared))

    def _judged(self, message: Progress) -> None:
        state = self.state
        scores = (message.candidate, message.present, message.first)
        judged = Judged(epoch_s(), *scores, message.verdict, message.classes)
        state.judged = [*state.judged[1 - MAX_JUDGED :], judged]
        counts = zip(self._before, (message.requests, message.tokens, message.updates), strict=True)
        state.requests, state.tokens, state.updates = map(sum, counts)
        state.rejected += message.verdict == "worse"
        logger.info(
            "AdaServe: on the newest requests the draft in training gets %.3f tokens of 4 accepted, the "
            "present one %.3f, the first one %.3f: %s",
            *scores, message.verdict,
        )  # fmt: skip

    def _prepared(self, shared: File) -> tuple[Any, File]:
        """Beside the iterations, which this does not stop. The trainer leaves the memory as it is until it
        has its answer, and the array keeps it where the trainer is gone."""
        file = shared.copy()  # by numpy, which lets other threads run: copies by Python itself stop them
        return self._weights.prepared(checked(file, self.tensors)), file

    def _swap(self, offer: _Offer) -> None:
        self._offer, candidate = None, offer.candidate
        start_s = time.perf_counter()
        try:
            sharpening = self._first.sharpening.corrected(candidate.correction)
            weights, file = offer.ready.result()
            draft = _Draft(weights, sharpening)
        except Exception as error:  # the present draft was only read, so nothing is wrong with that one
            self.state.rejected += 1
            logger.warning("AdaServe: a new draft was dropped, the present one stays: %r", error)
            self.link.say(Answer(candidate.number, taken=False))
            return
        if self._learned is None:
            self._exchange(draft)
        else:
            self._learned = draft
        self._present = candidate, file
        self.state.swaps += 1
        self.state.swap_ms = (time.perf_counter() - start_s) * 1e3
        logger.info(
            "AdaServe: swapped in another draft: %.3f tokens of 4 accepted instead of %.3f (it took %.2f ms)",
            candidate.score, candidate.present, self.state.swap_ms,
        )  # fmt: skip
        self.link.say(Answer(candidate.number, taken=True))

    def _serving(self) -> _Draft:
        return _Draft(self._weights.served(), self._source.sharpening)

    def _exchange(self, draft: _Draft) -> None:
        self._weights.exchange(draft.weights)
        self._source.sharpening = draft.sharpening

    def _report(self) -> None:
        self.state.recorded, self.state.dropped = self._tap.recorded, self._tap.dropped
        self.state.cpu_s = self.link.cpu_s
        self._stats.learned(self.state)


def require_learnable(model: Any, folder: str, target: str | None) -> None:
    """Raises UnsupportedError where a trainer could not train such a draft, or nothing that it makes could be
    served: otherwise only the log would say so, after a while. Arguments as of ``Learner``."""
    from adaserve.trainer.draft_head import learnable  # with what trains heads

    try:
        if target is None:
            require_fit(model, shapes_of(folder))
        else:
            learnable(folder, target)
    except Exception as error:  # transformers raises whatever it likes for models that it doesn't know
        raise UnsupportedError(f"the draft {folder} cannot learn ({error}): leave --learn out") from error


def bytes_of(folder: str, target: str | None) -> int:
    """Room for what a trainer makes of a draft, a safetensors file. Arguments as of ``Learner``.

    A model may be served in less than its checkpoint has, in type and in tokens, so its config counts, in
    fp32; memory that nobody writes costs nothing."""
    from adaserve.trainer.draft_head import file_bytes  # with what trains heads

    if target is not None:
        return file_bytes(folder) + HEADER_BYTES
    return sum(4 * math.prod(shape) for shape in shapes_of(folder).values()) + HEADER_BYTES


def known_tokens(model: Any, vocabulary: int) -> NDArray[np.int64] | None:
    """Ids of the tokens that SGLang's draft ``model`` has logits of; None = all of the target's."""
    ids = getattr(model, "hot_token_id", None)
    if ids is not None:
        return np.asarray(ids.cpu(), np.int64)
    own = int(model.config.vocab_size)
    return np.arange(own) if own < vocabulary else None


def warn_of_slow_training(device: str, parameters: Sequence[Any]) -> None:
    """``device``: where a draft with these ``parameters`` is trained; it is served where they are."""
    size = sum(p.numel() for p in parameters)
    if device == "cpu" and parameters[0].is_cuda and size > MANY:
        logger.warning(
            "AdaServe: the draft's %.0f million parameters are trained by one thread of a CPU, where an "
            "update takes about %.0f s: give --adaserve-learn-device a GPU, such as cuda:1",
            size / 1e6,
            size * UPDATE_S,
        )


def is_tight(states: Iterable[RequestState], now_s: float) -> bool:
    """Whether a running request is near the limit of its TPOT SLO, or beyond it."""
    return any(now_s - s.decode_start_s > TIGHT * s.tpot_slo_s * max(1, s.decoded) for s in states)

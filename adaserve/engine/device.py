"""Only what differs by device: a model's forwards, draws, copies, clocks. The iteration (``decode.py``) is
written once on top of these. ``cpu/`` and ``gpu/`` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from adaserve.engine.grammar import Forbid
from adaserve.engine.logits.filters import Filter
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.rotary_shift import RotaryShift
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import TreeShape
from adaserve.engine.trees.verify import Acceptance, VerifyBatch


class Mark(Protocol):
    """A point in the device's queue."""

    def seconds_until(self, later: Mark) -> float:
        """Time between two marks; both must have been reached."""
        ...

    def wait(self) -> None:
        """Returns once the device has come to it."""
        ...


Run = tuple[Mark, Mark]
"""Start and end of one forward."""


class HostCopy(Protocol):
    """Device values on their way to the host."""

    def read(self) -> dict[str, np.ndarray]:
        """The values; waits until they have arrived."""
        ...


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a verification of n requests will have accepted, on the device, for a search that is queued behind
    it."""

    most: int  # tokens that it can commit of each request
    length: Tensor  # int64 [n]: tokens that it commits, ``Acceptance.length``
    emitted: Tensor  # int64 [n, stride]: ``Acceptance.emitted``
    tokens: Tensor  # int64 [T]: what is verified
    root: Tensor  # int64 [n]: index of each request's root among them
    rows: np.ndarray  # int64 [a]: the requests that are searched for


@dataclass(frozen=True, slots=True)
class Search:
    """One beam search over a rows, ``shape.beams`` wide (AdaServe, Algorithm 2 line 8)."""

    shape: TreeShape
    base: np.ndarray  # int64 [a]: cached tokens, which is the root's position
    pool_rows: np.ndarray  # int64 [a]: rows of ``req_to_token``
    scale: np.ndarray  # float32 [a]: what the draft's logits are multiplied by
    spread: np.ndarray  # float32 [a]: how much of its request's noise is added; 0 = greedy
    keys: np.ndarray  # uint64 [a]: of that noise
    awaited: Awaited | None = None
    """What comes before, where that is not known yet: then ``base`` counts as if all of it were accepted, and
    the first step has two tokens of each request, which are read there."""
    forbid: Forbid | None = None
    """Asked before each step by devices whose host sees them; others draft what grammars forbid, too."""

    def transform(self, beams: int, step: int) -> LogitTransform:
        """How the logits of ``beams`` nodes of depth ``step`` - 1 per row are read."""
        columns = (self.scale, self.spread, self.keys, self.base + step - 1)
        return LogitTransform(*(np.repeat(c, beams) for c in columns))


@dataclass(frozen=True, slots=True)
class Beams:
    """The candidates of a beam search; node j of a row is at place j of the shape."""

    tokens: np.ndarray  # int64 [a, nodes]
    parents: np.ndarray  # int64 [a, nodes]: -1 = child of the root
    logprobs: np.ndarray  # float64 [a, nodes]: of whole paths
    steps: int  # draft steps that were run

    def of(self, rows: np.ndarray) -> Beams:
        """Those of some of its rows, int64 [b]."""
        if np.array_equal(rows, np.arange(len(self.tokens))):
            return self
        return Beams(self.tokens[rows], self.parents[rows], self.logprobs[rows], self.steps)


KeepGoing = Callable[[int, np.ndarray], bool]
"""(step, path log-probabilities [a, beams] of its level) -> whether another step is worth its time."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A search that was queued."""

    read: Callable[[], Beams]  # waits for the device if it must
    found: Tensor | None = None
    """int64 [3, R, nodes], ``Levels.found``: the candidates on the device, until the drafter's next search;
    None where the host has them at once."""


class Drafter(Protocol):
    """What makes candidate trees: a model step by step, or heads that need no steps."""

    def rehearse(self, batch: TreeBatch, width: int) -> int:
        """Draft steps over the batch's requests as they are served, for measurements; how many. ``width``:
        best successors that a token's step finds, at most."""
        ...

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """Queues a whole beam search. ``first`` ends, per row, in the root; its gap is that of all steps.

        ``keep`` is asked between steps by devices that can stop early.
        """
        ...

    def take_runs(self) -> list[Run]:
        """Start and end of every forward since the last call; durations are known once they were reached."""
        ...


class ModelForward(Drafter, Protocol):
    """One model's forwards over tree batches. Not safe for concurrent calls."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest forward."""
        ...

    @property
    def was_graph(self) -> bool:
        """Whether the last forward was a CUDA graph, as SGLang's log and metrics say."""
        ...

    @property
    def follows(self) -> bool:
        """Whether a forward may be queued behind a verification whose outcome is not known."""
        ...

    @property
    def first_tokens(self) -> int | None:
        """Tokens per request that the first step of a search has room for, the root included; None = for as
        many as there are."""
        ...

    def run(self, batch: TreeBatch) -> Any:
        """Opaque states of the T tokens, whose KV is written."""
        ...

    @property
    def most_beside(self) -> int:
        """Prompt tokens that a verification can have in its forward (``run_beside``); 0 = none."""
        ...

    def run_beside(self, batch: TreeBatch, texts: TreeBatch) -> Any:
        """``run``, with the prompts ``texts`` in the same forward. SGLang calls the model for these next, and
        then nothing is left to compute for them but logits."""
        ...

    def forget_read(self) -> None:
        """Drops what ``run_beside`` has kept of prompts, if SGLang has not called the model for them."""
        ...

    def feed(self, batch: TreeBatch) -> None:
        """Writes the KV of texts, and nothing else."""
        ...

    def fill(self, batch: TreeBatch) -> None:
        """What ``run`` does before it queues the forward; the next ``run`` does it again."""
        ...

    def logits(self, states: Any) -> Tensor:
        """fp32 [T, vocab], which the caller may change; valid until the next forward."""
        ...

    def argmax(self, states: Any) -> Tensor:
        """Greedy token of each, int64 [T]."""
        ...


class ParallelHeads(Drafter, Protocol):
    """Heads that make all levels of a tree at once (Medusa)."""

    @property
    def most_steps(self) -> int:
        """Levels that there are heads for."""
        ...


class Device(Protocol):
    """The parts that an iteration is made of."""

    @property
    def target(self) -> ModelForward: ...

    @property
    def drafts(self) -> Sequence[ModelForward]:
        """Of the draft models, in their order; empty where none is served."""
        ...

    @property
    def medusa(self) -> ParallelHeads | None:
        """Medusa heads, where they draft in place of a draft model."""
        ...

    @property
    def self_drafter(self) -> Drafter | None:
        """The target's searches, where it drafts for itself."""
        ...

    @property
    def drafters(self) -> Sequence[Drafter]:
        """All that drafts."""
        ...

    @property
    def target_states(self) -> Any | None:
        """The target's hidden states by KV slot, where a head reads them; moved as a KV pool is."""
        ...

    @property
    def stops_early(self) -> bool:
        """Whether a draft can be stopped between its steps, since the host sees each."""
        ...

    @property
    def least_gain(self) -> float:
        """`priced` drafts only for at least this much gain: trees cost more than the latency model says."""
        ...

    @property
    def most_beams(self) -> int | None:
        """Of all requests in a draft step, where one has more than ``NARROW``; None = no limit."""
        ...

    @property
    def shift(self) -> RotaryShift | None:
        """Of the target's rotary positions, where it has M-RoPE."""
        ...

    def is_busy(self) -> bool:
        """Whether it works on what was queued, so that the host has time."""
        ...

    def mark(self) -> Mark:
        """The end of all that was queued so far."""
        ...

    def put(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Tensor]:
        """Host arrays on the device, in one asynchronous upload."""
        ...

    def get(self, **tensors: Tensor) -> HostCopy:
        """Queues a copy of int64, float64, float16 or bool tensors to the host."""
        ...

    @property
    def filter(self) -> Filter:
        """Top-k, top-p and min-p."""
        ...

    def draw(self, logits: Tensor, transform: LogitTransform) -> Tensor:
        """The best token of every row of fp32 ``logits`` [rows, vocab] as read, int64 [rows]."""
        ...

    def accept(
        self, tensors: Mapping[str, Tensor], draws: Tensor, n: int, deepest: int, stride: int
    ) -> Acceptance:
        """What the target's ``draws`` int64 [T] accept of a ``VerifyBatch`` of n rows whose arrays are
        ``tensors``. ``deepest``: depth of its deepest token."""
        ...

    def in_place(self, verified: VerifyBatch, acceptance: Acceptance) -> bool:
        """Whether all accepted KV is known to be where it belongs."""
        ...

    def moves(
        self, tensors: Mapping[str, Tensor], acceptance: Acceptance, table: Tensor, n: int, deepest: int
    ) -> tuple[Tensor, Tensor]:
        """``verify.moves``, by SGLang's ``table`` of slots."""
        ...

    def move(self, pool: Any, target: Tensor, source: Tensor) -> None:
        """Moves KV between slots of one of SGLang's pools, or ``target_states``: paths as ``moves`` gives
        them, both int64 [n, deepest]. Entries that move onto themselves do nothing."""
        ...

    def time(self, models: Sequence[Any], step: Callable[[], Any]) -> float:
        """Seconds of the forwards of ``models`` in ``step``, which nothing else runs beside."""
        ...

    def report(self) -> dict[str, Any]:
        """For ``/server_info``; JSON values."""
        ...

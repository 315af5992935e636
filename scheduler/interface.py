"""The contract between a policy and whatever drives it (the SGLang worker or the simulator).

A driver runs one decode iteration like this::

    plan = policy.plan(running, now_s)            # depth, width, budget
    trees = draft(plan)                           # candidate token trees; none when plan.draft.depth == 0
    selection = policy.select(plan, trees)        # which candidates are verified
    outcome = verify(selection)                   # one target forward
    policy.observe(outcome)                       # may arrive one iteration late (overlap schedule)
    policy.forget(rid)                            # once per finished or aborted request

A policy is passive: time is an argument, it owns no clock, no thread and no randomness.
Under an overlapped schedule the outcome of iteration i is observed after iteration i+1 was
planned; ``IterationPlan.iteration`` ties the two together.

Everything is flat arrays over rows (requests) and nodes (candidate tokens), so that the same
values feed SDPA on a CPU, FlashInfer on a GPU and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MODEL, SECOND_MODEL = 1, 2
"""Bits of ``CandidateTrees.source`` for nodes that the first draft model made, and the second one."""
DRAFTED = MODEL | SECOND_MODEL
"""Nodes that draft steps made. All other bits belong to the driver."""

MIN_WINDOW = 16
"""A draft step reads at least this many recent tokens: those that a draft model catches up on are among
them."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Context(NamedTuple):
    """Cached tokens that a forward attends to."""

    tokens: float = 0.0  # sum of L over its requests
    requests: int = 1

    @property
    def each(self) -> float:
        """Cached tokens per request: what every token of a forward attends to, on average."""
        return self.tokens / self.requests


NO_CONTEXT = Context()


@dataclass(frozen=True)
class CandidateTrees:
    """Candidate trees of all rows, flat. Nodes of a row are ordered by depth, parents first."""

    row_start: IntArray  # [n + 1]: nodes of row r are row_start[r] : row_start[r + 1]
    token: IntArray  # [m]
    parent: IntArray  # [m]: index of the parent inside its row; -1 = child of the root
    depth: IntArray  # [m]: 1 for children of the root
    logprob: FloatArray  # [m]: log of the path probability root..node under the draft, <= 0
    source: IntArray | None = None
    """[m]: who proposed each node, as bits. Nodes without ``DRAFTED`` cost nothing to draft. Nodes that also
    have a bit of the driver would exist without a draft step. None = all are from one draft model."""

    @staticmethod
    def empty(n: int) -> CandidateTrees:
        none = np.zeros(0, np.int64)
        return CandidateTrees(np.zeros(n + 1, np.int64), none, none, none, np.zeros(0))

    @property
    def n_rows(self) -> int:
        return len(self.row_start) - 1

    @property
    def n_nodes(self) -> int:
        return len(self.token)

    @cached_property
    def row(self) -> IntArray:
        """Row of every node, not to be written, [m]."""
        return _rows_of(self.row_start.tobytes())[0]

    @cached_property
    def first(self) -> IntArray:
        """Index of the first node of every node's row, not to be written, [m]."""
        return _rows_of(self.row_start.tobytes())[1]

    @cached_property
    def above(self) -> IntArray:
        """Index of every node's parent among all nodes, [m]; ``n_nodes`` for children of a root."""
        return np.where(self.parent < 0, self.n_nodes, self.parent + self.first)

    @cached_property
    def sources(self) -> IntArray:
        """``source``, also where it is None, [m]."""
        return np.full(self.n_nodes, MODEL) if self.source is None else self.source

    @cached_property
    def begins_level(self) -> BoolArray:
        """Whether a node is the first one of its level in its row, [m]."""
        row, depth = self.row, self.depth
        begins: BoolArray = np.append(True, (row[1:] != row[:-1]) | (depth[1:] != depth[:-1]))
        return begins[: self.n_nodes]

    @cached_property
    def draft_steps(self) -> int:
        """Draft steps that were run: the depth of the deepest node that one made."""
        depth = self.depth if self.source is None else self.depth[self.source & DRAFTED > 0]
        return int(depth.max(initial=0))


@lru_cache(maxsize=64)
def _rows_of(starts: bytes) -> tuple[IntArray, IntArray]:
    """``CandidateTrees.row`` and ``first``, cached: searches over the same number of rows often share
    them."""
    row_start = np.frombuffer(starts, np.int64)
    sizes = row_start[1:] - row_start[:-1]
    found = np.arange(len(sizes)).repeat(sizes), row_start[:-1].repeat(sizes)
    for values in found:
        values.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The draft steps to be made, or being made, for n requests."""

    depth: int  # d: draft steps; 0 = draft nothing
    width: int = 1  # w: beams kept per request and step
    branching: tuple[int, ...] | None = None
    """Fixed expansion (SpecInfer): children per live beam at each step, instead of a beam of width w.
    ``len(branching) == depth``."""
    rows: BoolArray | None = None
    """Rows that draft steps are made for, [n]; None = all. The other rows have only offered candidates."""
    window: IntArray | None = None
    """How many of the most recent cached tokens draft steps read of each row, besides its first ``sinks``,
    [n]; 0 = all cached tokens, otherwise at least ``MIN_WINDOW``. None = 0 for every row."""
    sinks: int = 0

    def __post_init__(self) -> None:
        assert self.depth >= 0 and self.width >= 1
        assert self.branching is None or len(self.branching) == self.depth

    def count(self, n: int) -> int:
        """How many of n rows draft steps are made for."""
        return n if self.rows is None else int(np.count_nonzero(self.rows))

    def reads(self, context: IntArray) -> IntArray:
        """How many of ``context`` [n] cached tokens a draft step reads of each row, [n]."""
        return tokens_read(context, self.window, self.sinks)


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """The requests that decode in this iteration; every array has shape [n], except for offered
    candidates."""

    rids: tuple[str, ...]
    slo_class: tuple[str, ...]  # bounded set of names, "default" when the request named none
    tpot_slo_s: FloatArray  # seconds per output token; inf = no SLO
    decode_start_s: FloatArray  # time of the first output token (TTFT is excluded from l)
    decoded_tokens: IntArray  # o: tokens produced since decode_start_s
    context_tokens: IntArray  # tokens in the KV cache
    remaining_tokens: IntArray  # upper bound of what is still to be generated, >= 1
    max_depth: IntArray  # deepest node that may be kept; 0 = root only (custom logit processors, ...)
    temperature: FloatArray  # 0 = greedy
    prefill_tokens: int = 0
    """Prompt tokens that will share this iteration's verify forward; 0 = none."""
    offered: CandidateTrees | None = None
    """Candidates that exist before a plan is made, at no cost, within ``max_depth``. Drafted ones are added
    to them."""
    underway: DraftPlan | None = None
    """The draft of this iteration, if it was queued before it was known what the previous iteration accepts.
    Plans use it as it is."""
    may_go_unread: bool = False
    """Whether candidates can be verified before the host has read them. If a plan takes all of them, the
    device need not wait for the host's selection."""
    likely_tokens: IntArray | None = None
    """How many tokens are likely still to be generated, [n], by what clients expect or by the lengths of
    earlier answers of the class; None = ``remaining_tokens``. It may be wrong, so it never limits a tree."""

    def __len__(self) -> int:
        return len(self.rids)

    @property
    def tokens_ahead(self) -> IntArray:
        """Best estimate of the tokens until the end, [n]: an SLO's slack is judged by it."""
        return self.remaining_tokens if self.likely_tokens is None else self.likely_tokens


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """What the drafter has to do, and what selection needs to know later."""

    iteration: int  # counts plans of this policy; echoed in IterationOutcome
    now_s: float
    running: RunningBatch
    draft: DraftPlan
    budget: int  # B: tokens of the verification forward, roots included
    n_max: int | None = None  # most nodes that the SLO phase may add to one request
    weight: FloatArray | None = None  # value of one accepted token of each row; [n]
    t_spec_s: float = 0.0  # predicted duration of this iteration
    cap: IntArray | None = None
    """Deepest node per row that may be kept, [n]; None = no row is limited below ``draft.depth``."""
    then: DraftPlan | None = None
    """What to draft in the next iteration, judged by this one, if that draft cannot wait for a plan."""
    takes_all: bool = False
    """All drafted candidates within ``cap`` are verified, whatever they are. So a driver may queue the
    verification behind the draft before the candidates are known. It asks for the selection later, so that
    the policy can learn from it."""

    @property
    def need(self) -> FloatArray:
        """``A(r) = (l + t_spec) / t_TPOT - o`` (AdaServe section 3, before Eq. 3): tokens, bonus included,
        that each row needs now, [n]; not capped.

        1 or less: the token that every iteration yields suffices. An SLO of inf gives ``-o``; an SLO of
        0 or less can't be met and gives +inf. A clock that went backwards counts as no time elapsed.
        """
        running = self.running
        elapsed = np.maximum(self.now_s - running.decode_start_s, 0.0)
        elapsed += self.t_spec_s
        need: FloatArray = np.full(len(running), np.inf)
        np.divide(elapsed, running.tpot_slo_s, out=need, where=running.tpot_slo_s > 0)
        need -= running.decoded_tokens
        return need

    @property
    def draft_context(self) -> Context:
        """What a draft step reads, summed over all rows that are drafted for."""
        reads, rows = self.draft.reads(self.running.context_tokens), self.draft.rows
        reads = reads if rows is None else reads[rows]
        return Context(float(reads.sum()), max(1, len(reads)))

    @property
    def drafting_rows(self) -> int:
        """How many rows draft steps are made for."""
        return self.draft.count(len(self.running))


def tokens_read(context: IntArray, window: IntArray | None, sinks: int) -> IntArray:
    """How many of ``context`` [n] cached tokens draft steps read: the sinks and the last ``window`` [n]."""
    if window is None:
        return context
    return np.where(window > 0, np.minimum(window + sinks, context), context)


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates that are verified. Kept nodes of a row always form a tree with its root."""

    keep: BoolArray  # [m]
    counts: IntArray  # [n]: kept nodes per row, root not counted
    slo_counts: IntArray  # [n]: how many of them the SLO phase chose
    expected_tokens: FloatArray  # [n]: 1 + sum of estimated path probabilities of kept nodes

    @staticmethod
    def nothing(n: int, candidates: int = 0) -> Selection:
        """The roots of n rows alone."""
        zeros = np.zeros(n, np.int64)
        return Selection(np.zeros(candidates, np.bool_), zeros, zeros, np.ones(n))

    @property
    def verify_tokens(self) -> int:
        """Tokens of the verification forward, roots included."""
        return int(np.add.reduce(self.counts)) + len(self.counts)


@dataclass(frozen=True, slots=True)
class IterationOutcome:
    """What one iteration did. Times are seconds of wall clock, measured by the driver.

    A draft that must first read tokens it had missed (after iterations that drafted nothing) catches up. That
    is not part of the cost of a draft step, so the driver keeps it out of ``draft_s``, on every device.
    """

    plan: IterationPlan
    trees: CandidateTrees
    selection: Selection
    accepted: BoolArray  # [m]: node was kept, tested and accepted
    new_tokens: IntArray  # [n]: tokens emitted, bonus included
    end_s: float  # when the outcome was known
    draft_s: float  # plan and draft steps, catching up not included
    select_s: float
    verify_s: float
    total_s: float  # plan to commit, catching up included, prefill not
    since_last_s: float = 0.0  # time since the previous decode iteration ended (prefill included)
    prefilled: bool = False  # whether prompts had forwards of their own in that time
    prefill_tokens: int = 0  # prefill tokens that shared the verify forward; their time is in verify_s
    first_level_s: float | None = None
    """The part of ``draft_s`` until the first of several levels was done; None if only whole drafts are
    timed."""

    @property
    def cycle_s(self) -> float:
        """From the end of the previous iteration to the end of this one, if any of its requests decoded in
        that one as well. Otherwise the time in between is not theirs, and this is ``total_s``."""
        continued = self.since_last_s > 0 and bool(self.plan.running.decoded_tokens.any())
        return self.since_last_s if continued else self.total_s


class Policy(Protocol):
    """One scheduling policy. Implementations live in this package and are built by name."""

    name: str

    def plan(self, running: RunningBatch, now_s: float) -> IterationPlan:
        """Decides the shape of this iteration's candidate trees. ``running`` is never empty."""
        ...

    def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """Decides which candidates are verified: all within their ``cap`` if the plan takes all."""
        ...

    def prepare(self, plan: IterationPlan, like: CandidateTrees | None) -> None:
        """Optional, for a driver that has to wait for the candidates: makes the next ``select`` faster.

        ``like``: candidates of another iteration of the same requests, for a trial selection from which
        nothing is learned. It brings code and data back into the processor's caches."""
        ...

    def keep_drafting(self, plan: IterationPlan, step: int, frontier_logprob: FloatArray) -> bool:
        """Optional for a driver: asked after draft step ``step`` (1-based) while step < plan.draft.depth.

        ``frontier_logprob`` [n, beams]: path log-probabilities of the newest level, -inf where a row
        has no such beam. False = select from the candidates so far. A driver that cannot stop early (CUDA
        graphs over all steps) need not ask.
        """
        ...

    def observe(self, outcome: IterationOutcome) -> None:
        """Learns from a finished iteration (possibly one iteration late)."""
        ...

    def forget(self, rid: str) -> None:
        """Drops all state of a request that finished or was aborted; unknown rids are ignored."""
        ...

"""A replica that looks its iterations up, for traces so long that playing each one would take too long.

How long an iteration takes and how many tokens it yields is first learned from played ones, by batch size and
class. All else is what ``Replica`` does: the queue, the gate, prefills, the KV cache. What is lost is how the
policy reacts to single requests that fall behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.interface import BoolArray, Context, FloatArray
from adaserve.scheduler.simulator.replica import Replica, ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, build_replica
from adaserve.scheduler.simulator.workload import SimRequest

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that are played; in between and beyond, lines."""
SAMPLE = 12
"""Requests that are played at every size, at least: small batches several times."""
ITERATIONS = 100
"""That are played of each batch."""
ENDLESS = 1 << 30
"""Tokens of an answer that does not end while it is watched."""


@dataclass(frozen=True, slots=True)
class PaceTable:
    """What a replica does with n running requests, [k] each. Slower hosts and prefills are added later."""

    n: FloatArray
    seconds: FloatArray  # per decode iteration, without what the verification reads of the contexts
    verified: FloatArray  # tokens of a verification
    tokens: dict[str, FloatArray]  # class -> tokens per request and iteration
    middle: dict[str, float]  # class -> mean ease of its requests
    slope: float  # of log(tokens) over ease, within a class

    def at(self, values: FloatArray, n: int) -> float:
        """``values`` [k] for n requests. Beyond the largest size the last slope continues."""
        slope = float((np.diff(values[-2:]) / np.diff(self.n[-2:])).sum())
        return float(np.interp(n, self.n, values)) + max(0.0, n - self.n[-1]) * slope

    def paces(self, classes: Sequence[str], difficulty: FloatArray) -> FloatArray:
        """Tokens per iteration of n requests, [n]."""
        n = len(classes)
        usual = {name: float(np.interp(n, self.n, self.tokens[name])) for name in set(classes)}
        mean = np.array([usual[name] for name in classes])
        off = ease(difficulty) - np.array([self.middle[name] for name in classes])
        return np.maximum(1.0, mean * np.exp(self.slope * off))


def ease(difficulty: FloatArray) -> FloatArray:
    """Logit of the mean probability of the draft's best child."""
    return np.log(difficulty / (1.0 - difficulty))


@dataclass(frozen=True, slots=True)
class _Watched:
    """One batch while nobody came or left."""

    n: int
    seconds: float
    verified: float
    classes: tuple[str, ...]
    ease: FloatArray  # [n]
    pace: FloatArray  # [n]


def learn_pace(requests: Sequence[SimRequest], config: SimulationConfig) -> PaceTable:
    """Plays batches of these requests on a quiet replica, each request in the middle of its answer."""
    rng = np.random.default_rng([config.seed, 0xFACE])
    watched = []
    for n in (size for size in SIZES if size <= config.replica.max_running):
        for _ in range(-(-SAMPLE // n)):
            picked = rng.choice(len(requests), n, replace=n > len(requests))
            watched.append(_watch([requests[i] for i in picked], config))
    return _table(watched, sorted({r.slo_class for r in requests}))


def _watch(requests: Sequence[SimRequest], config: SimulationConfig) -> _Watched:
    quiet = replace(
        config.replica, kv_tokens=1 << 60, max_running=1 << 30, noise=0.0, busy=(), prefill=PrefillConfig(),
        shed=False,
    )  # fmt: skip
    replica = build_replica(replace(config, replica=quiet))
    for i, r in enumerate(requests):
        so_far = r.prompt_tokens + r.output_tokens // 2
        endless = replace(r, prompt_tokens=so_far, output_tokens=ENDLESS, cap_tokens=ENDLESS)
        replica.submit(replace(endless, rid=f"{i}", arrival_s=0.0))
    while len(replica.rows) < len(requests):
        replica.step()
    rows, before, first = replica.rows, replica.rows.decoded.copy(), len(replica.log)
    for _ in range(ITERATIONS):
        replica.step()
    log = replica.log[first:]
    verified = float(np.mean([i.verify for i in log]))
    seconds = float(np.mean([i.seconds for i in log]))
    made = rows.decoded - before
    context = Context(float((rows.prompt + before + made / 2).sum()), len(rows))
    alone_s = seconds - config.replica.latency.verify.kv_read.seconds(verified, context)
    return _Watched(len(rows), alone_s, verified, rows.classes, ease(rows.difficulty), made / ITERATIONS)


def _table(watched: Sequence[_Watched], names: Sequence[str]) -> PaceTable:
    size_of = np.array([w.n for w in watched])
    sizes = np.unique(size_of)
    seconds, verified = (
        np.array([np.mean([getattr(w, key) for w in watched if w.n == n]) for n in sizes])
        for key in ("seconds", "verified")
    )
    n = np.repeat(size_of, size_of)  # of every request that was watched
    classes = np.array([name for w in watched for name in w.classes])
    pace, easy = (np.concatenate([getattr(w, key) for w in watched]) for key in ("pace", "ease"))
    tokens = {name: np.zeros(len(sizes)) for name in names}
    over = under = 0.0
    for name in names:
        for k, size in enumerate(sizes):
            mine = _where_any((classes == name) & (n == size), n == size)
            tokens[name][k] = pace[mine].mean()
            off = easy[mine] - easy[mine].mean()
            over, under = over + float(off @ np.log(pace[mine])), under + float(off @ off)
    middle = {name: float(easy[_where_any(classes == name, n > 0)].mean()) for name in names}
    slope = over / under if under else 0.0
    return PaceTable(sizes.astype(np.float64), seconds, verified, tokens, middle, slope)


def _where_any(wanted: BoolArray, otherwise: BoolArray) -> BoolArray:
    return wanted if wanted.any() else otherwise


class PacedReplica(Replica):
    """Looks its iterations up in a ``PaceTable``."""

    def __init__(
        self, pace: PaceTable, config: ReplicaConfig, rng: np.random.Generator, drafts: bool
    ) -> None:
        super().__init__(config, rng, drafts)
        self._table = pace
        self._of: tuple[tuple[str, ...], FloatArray, float, float] = ((), np.zeros(0), 0.0, 0.0)

    def _decode(self, prefill_tokens: int) -> None:
        rows = self.rows
        paces, seconds, verified = self._usual()
        left = rows.length - rows.decoded
        drawn = np.floor(paces + self._rng.random(len(paces))).astype(np.int64)
        new = np.minimum(drawn, left)
        context = Context(float((rows.prompt + rows.decoded).sum()), len(rows))
        seconds += self.config.latency.verify.kv_read.seconds(verified, context)
        if prefill_tokens:
            alone_s, shared_s = (self._verify_s(verified, n, context) for n in (0, prefill_tokens))
            self._read_beside(prefill_tokens, self._slowed(shared_s), alone_s)
            seconds += shared_s - alone_s
        total = self._noisy(seconds) + self._slowed(self._draft_prefill_s())
        self.now_s += total
        continued = self._last_end_s and rows.decoded.any()
        cycle_s = self.now_s - self._last_end_s if continued else total
        self._decoded(slice(None), new, verified, prefill_tokens, cycle_s)

    def _usual(self) -> tuple[FloatArray, float, float]:
        """Tokens [n], seconds and verified tokens of an iteration of these requests."""
        if self._of[0] is not self.rows.rids:
            n, table = len(self.rows), self._table
            paces = table.paces(self.rows.classes, self.rows.difficulty)
            self._of = self.rows.rids, paces, table.at(table.seconds, n), table.at(table.verified, n)
        return self._of[1:]

"""The simulator on the requests of a sweep's blocks, with the host as they show it: does it say the same?

The same records serve three questions: whether the simulator's attainment is the engine's, whether it puts
the systems in the same order, and how much is left for any policy, by one that is told every outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve.bench.markdown import table
from adaserve.bench.sweep.aggregate import Block, Outcome, Results
from adaserve.bench.sweep.host_model import (
    as_served,
    fitted_means,
    fitted_overhead,
    in_order,
    lengths_of,
    prefills_as_served,
    shared_forwards,
)
from adaserve.bench.sweep.plan import Point
from adaserve.bench.sweep.systems import STOCK_PRIORITY, System, system
from adaserve.config import MAX_RUNNING, AdaServeConfig
from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, simulate
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, drawn_difficulty
from adaserve.slo.classes import seconds
from adaserve.slo.run_summary import RequestRecord, percent

LIMIT, TOLD = "clairvoyant", "told lengths"
"""What is replayed besides: with every outcome known, and with ``max_tokens`` exactly where answers end."""
CHUNK_TOKENS = 256
"""SGLang's chunked prefill on a CPU, as ``ServerSpec`` starts it."""
CLOSE_POINTS = 5.0
"""The simulator agrees when its attainment is within this of the engine's."""


@dataclass(frozen=True, slots=True)
class SimulatorCheck:
    """A system at a point, as the engine served it and as the simulator does; attainments are 0 to 1."""

    point: Point
    policy: str
    engine: Block
    simulated: Block

    @property
    def is_served(self) -> bool:
        """Whether a server can do that."""
        return self.policy not in (LIMIT, TOLD)

    @property
    def points(self) -> float:
        """Simulated - engine, percentage points of attainment."""
        return 100 * (self.simulated.share() - self.engine.share())


class Simulator:
    """Replays blocks of one sweep."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._latency = as_served(LatencyModel.from_json(results.head["latency_model"]), results)
        kinds = {None, *(point.kind for point in results.points())}
        means = {kind: fitted_means(results, kind) for kind in kinds}
        self._fitted = any(means.values())
        self._text = {kind: TextModel(mean=mean) if mean else TextModel() for kind, mean in means.items()}
        self._prefill = prefills_as_served(self._latency, results)
        fixed_s, self._row_s = fitted_overhead(results)
        self._latency = replace(self._latency, overhead_s=fixed_s)

    @property
    def acceptance(self) -> str:
        """A sentence on what the acceptance of drafts follows."""
        if self._fitted:
            return "Drafts are accepted as often as the chains of this sweep were."
        return "No chain played, so the acceptance of drafts is the simulator's default."

    @property
    def steps(self) -> int:
        """How often ``agreements`` tells what is replayed."""
        played = [self._played(point) for point in self._results.points()]
        return sum(len(here) + 2 * (self._results.default in here) for here in played)

    def _played(self, point: Point) -> dict[str, Outcome]:
        return {n: o for n, o in self._results.at(point).items() if n != STOCK_PRIORITY}

    def agreements(self, show: Callable[[str], None] = lambda _: None) -> list[SimulatorCheck]:
        """Every outcome that the simulator knows, and LIMIT and TOLD at each point.

        ``show`` gets what was replayed."""
        found = []
        for point in self._results.points():
            here = self._played(point)
            engine = {n: Block.total(o.blocks.values()) for n, o in here.items()}
            for name, outcome in here.items():
                found.append(SimulatorCheck(point, name, engine[name], self._replay(outcome)))
                show(f"{point.id} {name}")
            if mine := here.get(self._results.default):
                whole = engine[mine.policy]
                for name, told in ((LIMIT, False), (TOLD, True)):
                    replayed = self._replay(mine, None if told else LIMIT, told)
                    found.append(SimulatorCheck(point, name, whole, replayed))
                    show(f"{point.id} {name}")
        return found

    def _replay(self, outcome: Outcome, policy: str | None = None, told: bool = False) -> Block:
        stated = 0 if told else self._results.plan.max_tokens
        blocks = []
        for case in outcome.cases:
            setting = system(case["setting"])
            records = self._results.store.records(case["id"])
            sent = sim_requests(records, self._text[outcome.point.kind], case["seed"])
            requests = [replace(r, cap_tokens=max(stated, r.cap_tokens)) for r in sent]
            config = SimulationConfig(
                self._replica(setting, case["server"]),
                policy or setting.policy or "none",
                self._policy(),
                seed=case["seed"],
            )
            blocks.append(Block.of(simulate(requests, config).records()))
        return Block.total(blocks)

    def _replica(self, setting: System, server: Mapping[str, Any] | None) -> ReplicaConfig:
        """``server``: what it counted. Prompts share forwards if they did there. SGLang's own has no gate."""
        rule = PrefillConfig if setting.prefill in (None, "exclusive") else AdaServeConfig().for_prefills
        prefill, mixed = rule(chunk_tokens=CHUNK_TOKENS), shared_forwards(server)
        return ReplicaConfig(
            self._latency, kv_tokens=65_536, max_running=MAX_RUNNING, mixed=mixed, prefill=prefill,
            prefill_cost=self._prefill, row_overhead_s=self._row_s,
        )  # fmt: skip

    def _policy(self) -> PolicyConfig:
        from adaserve.engine.cpu.device import MIN_GAIN

        server = self._results.head["server"]
        config = AdaServeConfig(**{name: server[name] for name in ("budget", "max_depth", "max_width")})
        return config.for_policies(latency=self._latency, early_stop=True, least_gain=MIN_GAIN)


def sim_requests(records: Sequence[RequestRecord], text: TextModel, seed: int) -> list[SimRequest]:
    """The records' requests as they were sent, with difficulties drawn for their classes. Prompts are what
    has to be read of them: later turns of a conversation find the earlier ones in the cache."""
    ordered = in_order(records)
    classes = [r.slo_class for r in ordered]
    lengths = lengths_of(ordered)
    difficulty, bias = drawn_difficulty(text, classes, np.random.default_rng([seed, 0xADA]))
    return [
        SimRequest(
            rid=r.id,
            slo_class=r.slo_class,
            tpot_slo_s=seconds(r.slo_tpot_ms),
            ttft_slo_s=seconds(r.slo_ttft_ms),
            arrival_s=r.scheduled_s,
            prompt_tokens=lengths[i][0],
            output_tokens=lengths[i][1],
            cap_tokens=lengths[i][1],
            difficulty=difficulty[i],
            bias=bias[i],
        )
        for i, r in enumerate(ordered)
    ]


def markdown(found: Sequence[SimulatorCheck]) -> str:
    """One table per point, systems in the engine's order, and how well the orders agree."""
    parts = []
    for point in dict.fromkeys(a.point for a in found):
        here = sorted((a for a in found if a.point == point), key=lambda a: -a.engine.share())
        cells = [
            (a.policy, *(f"{percent(made.share())}%" for made in (a.engine, a.simulated)), f"{a.points:+.1f}",
             *(" / ".join(f"{percent(made.share(k), 0)}%" for made in (a.engine, a.simulated))
               for k in ("met_tpot", "met_ttft")))
            for a in here if a.is_served
        ]  # fmt: skip
        heads = ("system", "engine", "simulator", "points", "TPOT alone", "TTFT alone")
        parts += [f"### {point.id}", table(heads, cells), _verdict(here)]
    return "\n\n".join(parts)


def _verdict(here: Sequence[SimulatorCheck]) -> str:
    real = [a for a in here if a.is_served]
    close = sum(abs(a.points) <= CLOSE_POINTS for a in real)
    pairs = [(a, b) for i, a in enumerate(real) for b in real[i + 1 :]]
    # Pairs that the engine itself cannot tell apart have no order.
    told = [(a, b) for a, b in pairs if abs(a.engine.share() - b.engine.share()) > CLOSE_POINTS / 100]
    same = sum(
        (a.engine.share() > b.engine.share()) == (a.simulated.share() > b.simulated.share()) for a, b in told
    )
    others = {a.policy: a.simulated.share() for a in here if not a.is_served}
    text = (
        f"{close} of {len(real)} systems within {CLOSE_POINTS:g} points; {same} of {len(told)} pairs that "
        "are further apart in the same order."
    )
    if others:
        text += (
            f" Told every outcome, a policy attains {percent(others[LIMIT])}% in the simulator; ours attains "
            f"{percent(others[TOLD])}% where max_tokens tells it the end of every answer."
        )
    return text


def to_json(found: Sequence[SimulatorCheck]) -> list[Mapping[str, Any]]:
    """For programs."""
    return [
        {
            "point": a.point.id,
            "policy": a.policy,
            "engine": round(a.engine.share(), 5) if a.is_served else None,
            "simulated": round(a.simulated.share(), 5),
        }
        for a in found
    ]

"""The simulator on the requests of a sweep's blocks, with the host's own profile: does it say the same?

The same records serve three questions: whether the simulator's attainment is the engine's, whether it puts
the systems in the same order, and how much is left for any policy, by one that is told every outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import siegelslopes

from adaserve.bench.markdown import table
from adaserve.bench.sweep.aggregate import Block, Outcome, Results
from adaserve.bench.sweep.kinds import KINDS
from adaserve.bench.sweep.plan import Point
from adaserve.bench.sweep.systems import GATE as GATED
from adaserve.bench.sweep.systems import STOCK_PRIORITY, System, system
from adaserve.config import MOST_RUNNING, AdaServeConfig
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import Context
from adaserve.scheduler.latency import LatencyModel, StepCost, TableCost
from adaserve.scheduler.policies import chain_length
from adaserve.scheduler.prefill import PrefillConfig, served_prefill
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, simulate
from adaserve.scheduler.simulator.trees import SyntheticChildren, acceptance_of_chains
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, drawn_difficulty
from adaserve.slo.metrics import RequestRecord

LIMIT, TOLD = "clairvoyant", "told lengths"
"""What is replayed besides: with every outcome known, and with ``max_tokens`` exactly where answers end."""
CHUNK_TOKENS = 256
"""SGLang's chunked prefill on a CPU, as ``ServerSpec`` starts it."""
SIZES = np.array(
    [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0]
)
CLOSE_POINTS = 5.0
"""The simulator agrees when its attainment is within this of the engine's."""


@dataclass(frozen=True, slots=True)
class Agreement:
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
        return 100 * (_share(self.simulated) - _share(self.engine))


def _share(block: Block, objective: str = "attained") -> float:
    return float(getattr(block, objective)) / block.requests if block.requests else 0.0


class Simulator:
    """Replays blocks of one sweep."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._latency = as_served(LatencyModel.from_json(results.head["latency_model"]), results)
        kinds = {None, *(point.kind for point in results.points())}
        self._text = {kind: TextModel(mean=fitted_means(results, kind)) for kind in kinds}
        self._prefill = prefills_as_served(self._latency, results)
        fixed_s, self._row_s = fitted_overhead(results)
        self._latency = replace(self._latency, overhead_s=fixed_s)

    def agreements(self, show: Callable[[str], None] = lambda _: None) -> list[Agreement]:
        """Every outcome that the simulator knows, and LIMIT and TOLD at each point.

        ``show`` gets what is replayed next."""
        found = []
        for point in self._results.points():
            here = {n: o for n, o in self._results.at(point).items() if n != STOCK_PRIORITY}
            for outcome in here.values():
                show(f"{point.id} {outcome.policy}")
                found.append(
                    Agreement(point, outcome.policy, _sum(outcome.blocks.values()), self._replay(outcome))
                )
            if mine := here.get(self._results.default):
                engine = _sum(mine.blocks.values())
                found.append(Agreement(point, LIMIT, engine, self._replay(mine, LIMIT)))
                found.append(Agreement(point, TOLD, engine, self._replay(mine, told=True)))
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
                self._replica(setting), policy or setting.policy or "none", self._policy(), seed=case["seed"]
            )
            blocks.append(Block.of(simulate(requests, config).records()))
        return _sum(blocks)

    def _replica(self, setting: System) -> ReplicaConfig:
        paced = setting.prefill == "slack"
        prefill = served_prefill(CHUNK_TOKENS) if paced else PrefillConfig(CHUNK_TOKENS)
        return ReplicaConfig(
            self._latency, kv_tokens=65_536, max_running=MOST_RUNNING, prefill_mode="exclusive",
            prefill=prefill, exclusive_tokens=CHUNK_TOKENS, prefill_cost=self._prefill,
            row_overhead_s=self._row_s,
        )  # fmt: skip

    def _policy(self) -> PolicyConfig:
        from adaserve.engine.cpu.device import LEAST_GAIN

        server = self._results.head["server"]
        config = AdaServeConfig(**{name: server[name] for name in ("budget", "max_depth", "max_width")})
        return config.for_policies(latency=self._latency, early_stop=True, least_gain=LEAST_GAIN)


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
            tpot_slo_s=np.inf if r.slo_tpot_ms is None else r.slo_tpot_ms / 1e3,
            ttft_slo_s=np.inf if r.slo_ttft_ms is None else r.slo_ttft_ms / 1e3,
            arrival_s=r.scheduled_s,
            prompt_tokens=lengths[i][0],
            output_tokens=lengths[i][1],
            cap_tokens=lengths[i][1],
            difficulty=difficulty[i],
            bias=bias[i],
        )
        for i, r in enumerate(ordered)
    ]


def in_order(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """By arrival."""
    return sorted(records, key=lambda r: (r.scheduled_s, int(r.id)))


def lengths_of(ordered: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """Tokens of each prompt that are not cached, and of each answer."""
    cached: dict[str, int] = {}
    found = []
    for r in ordered:
        prompt, output = _lengths(r, ordered)
        found.append((max(1, prompt - cached.get(r.session_id or "", 0)), output))
        if r.session_id is not None:
            cached[r.session_id] = prompt + output
    return found


def _lengths(record: RequestRecord, every: Sequence[RequestRecord]) -> tuple[int, int]:
    """Tokens of prompt and answer. Requests that failed say nothing of them, and get what their class has on
    average."""
    of = [record] if record.ok else [r for r in every if r.ok and r.slo_class == record.slo_class]
    prompt, output = (
        round(float(np.mean([getattr(r, f"{kind}_tokens") for r in of] or [1])))
        for kind in ("prompt", "output")
    )
    return max(1, prompt), max(1, output)


def fitted_means(results: Results, kind: str | None = None) -> dict[str, float]:
    """How predictable each class is: the mean at which simulated chains accept what the engine's did.

    Every block of this kind of traffic that a chain played counts, those that lengths were chosen on too; all
    that chains played where there is none."""
    chains = [
        (Point.parse(line["point"]).kind, length, line["id"])
        for line in results.store.finished().values()
        if (setting := str(line["setting"])).startswith("chain-")
        and (length := chain_length(setting.removesuffix(GATED))) is not None
    ]
    mine = [chain for chain in chains if chain[0] == kind] or chains
    accepted: dict[tuple[str, int], list[float]] = {}
    for _, length, name in mine:
        for r in results.store.records(name):
            if r.accept_length is not None:
                accepted.setdefault((r.slo_class, length), []).append(r.accept_length)
    by_class: dict[str, list[tuple[int, float]]] = {}
    for (name, length), values in accepted.items():
        by_class.setdefault(name, []).append((length, float(np.mean(values))))
    return {name: _fit(chains) for name, chains in by_class.items()}


def fitted_overhead(results: Results) -> tuple[float, float]:
    """Seconds that an iteration spends outside the models: in any case, and per running request.

    On a host whose cores also stream the tokens this is a large part, which a profile of forwards cannot see.
    A straight line through the blocks, by what their servers counted; the profile's own where none did. It is
    one of repeated medians (Siegel), which a few blocks can't bend: in far overloaded ones the forwards of
    all iterations differ from those of the loops that ``loop_s`` is the mean of, since more requests run
    where prompts come in between."""
    rows, seconds = [], []
    for line in results.store.finished().values():
        server = line.get("server") or {}
        if server.get("loop_s"):
            models_s = (server["seconds"]["draft"] + server["seconds"]["verify"]) / server["iterations"]
            rows.append(server["running"])
            seconds.append(max(0.0, server["loop_s"] - models_s))
    if len(set(rows)) < 2:
        return LatencyModel.from_json(results.head["latency_model"]).overhead_s, 0.0
    line = siegelslopes(seconds, rows)
    per_row, fixed = line.slope, line.intercept
    if per_row < 0 or fixed < 0:
        return (0.0, float(np.mean(seconds) / np.mean(rows))) if fixed < 0 else (float(np.mean(seconds)), 0.0)
    return float(fixed), float(per_row)


def as_served(profile: LatencyModel, results: Results) -> LatencyModel:
    """The profile, corrected by what forwards of each size took while blocks were served.

    A profile is measured on an idle server. Under load the same cores tokenize and stream, and a forward of
    few tokens, which waits for memory, suffers less by that than one of many. Per doubling of the tokens, the
    median ratio of served to profiled time over the blocks. Drafts as `_draft_as_served` has them."""
    profile = _draft_as_served(profile, results)
    tokens, ratios = [], []
    for line in results.store.finished().values():
        server, total = line.get("server"), line["all"]
        if not server or not server["iterations"] or not total["completed"]:
            continue
        each = (total["total_input_tokens"] + total["total_output_tokens"] / 2) / total["completed"]
        size = server["running"] * (1.0 + server["tree_nodes"])
        served_s = server["seconds"]["verify"] / server["iterations"]
        tokens.append(size)
        running = max(1, round(server["running"]))
        ratios.append(served_s / profile.verify_s(size, Context(running * each, running)))
    if not tokens:
        return profile
    doublings = np.round(np.log2(tokens))
    known = np.unique(doublings)
    ratio = [float(np.median(np.array(ratios)[doublings == k])) for k in known]
    sizes = np.unique(np.concatenate([2.0**known, SIZES]))
    times = np.maximum.accumulate(profile.verify_s(sizes) * np.interp(np.log2(sizes), known, ratio))
    table = TableCost(tuple(sizes.tolist()), tuple(times.tolist()), *profile.verify.reading)
    return replace(profile, verify=table)


def prefills_as_served(profile: LatencyModel, results: Results) -> StepCost | None:
    """What forwards that read prompts take, target and draft: a line through what the servers counted, and no
    less than one token takes; None where none did. They are far larger than what `as_served` knows.

    Traces are left out: their prompts are drawn so often that many are cached, which nobody counts."""
    parts, served_s = [], []
    for line in results.store.finished().values():
        server, kind = line.get("server"), Point.parse(line["point"]).kind
        if not server or not server.get("prefills") or not (kind is None or kind in KINDS):
            continue
        read = sum(n for n, _ in lengths_of(in_order(results.store.records(line["id"]))))
        parts.append((server["prefills"], read))
        served_s.append(server["seconds"]["prefill"])
    if not parts:
        return None
    each_s, token_s = nnls(np.array(parts, np.float64), np.array(served_s))[0]
    least = profile.verify.alone(SIZES[:1]) + profile.draft.alone(SIZES[:1])
    return TableCost(tuple(SIZES.tolist()), tuple(np.maximum(least, each_s + token_s * SIZES).tolist()))


def _draft_as_served(profile: LatencyModel, results: Results) -> LatencyModel:
    """One factor for the start of a draft with its first step, and one for all further steps, by the blocks
    whose drafts have the same number of steps in every iteration."""
    parts, served_s = [], []
    for line in results.store.finished().values():
        steps, server = chain_length(str(line["setting"]).removesuffix(GATED)), line.get("server")
        if steps is None or not server or not server["iterations"]:
            continue
        n = max(1, round(server["running"]))
        first_s = profile.draft_s(n, 1, 1)
        parts.append((first_s, profile.draft_s(n, steps, 1) - first_s))
        served_s.append(server["seconds"]["draft"] / server["iterations"])
    if not any(served_s):
        return profile
    first, later = nnls(np.array(parts), np.array(served_s))[0]
    start = profile.draft_first or profile.draft
    return replace(
        profile,
        draft=_times(profile.draft, later or first),
        draft_first=_times(start, first or later),
    )


def _times(cost: StepCost, factor: float) -> TableCost:
    return TableCost(tuple(SIZES.tolist()), tuple((factor * cost.alone(SIZES)).tolist()), *cost.reading)


def _fit(chains: Sequence[tuple[int, float]]) -> float:
    """The mean whose simulated tokens per verification are nearest; ``chains``: (length, tokens)."""
    children, text = SyntheticChildren(), TextModel()

    def off(mean: float) -> float:
        made = (acceptance_of_chains(children, text.spread, text.bias_spread, mean, k) for k, _ in chains)
        return float(sum((m - told) ** 2 for m, (_, told) in zip(made, chains, strict=True)))

    return min((round(0.01 * k, 2) for k in range(30, 95)), key=off)


def _sum(blocks: Iterable[Block]) -> Block:
    every = list(blocks)
    names = ("requests", "attained", "good_tokens", "met_tpot", "met_ttft")
    return Block(*(sum(getattr(b, name) for b in every) for name in names))


def markdown(found: Sequence[Agreement]) -> str:
    """One table per point, systems in the engine's order, and how well the orders agree."""
    parts = []
    for point in dict.fromkeys(a.point for a in found):
        here = sorted((a for a in found if a.point == point), key=lambda a: -_share(a.engine))
        cells = [
            (a.policy, f"{_share(a.engine):.1%}", f"{_share(a.simulated):.1%}", f"{a.points:+.1f}",
             *(f"{_share(a.engine, k):.0%} / {_share(a.simulated, k):.0%}" for k in ("met_tpot", "met_ttft")))
            for a in here if a.is_served
        ]  # fmt: skip
        heads = ("system", "engine", "simulator", "points", "TPOT alone", "TTFT alone")
        parts += [f"### {point.id}", table(heads, cells), _verdict(here)]
    return "\n\n".join(parts)


def _verdict(here: Sequence[Agreement]) -> str:
    real = [a for a in here if a.is_served]
    close = sum(abs(a.points) <= CLOSE_POINTS for a in real)
    pairs = [(a, b) for i, a in enumerate(real) for b in real[i + 1 :]]
    # Pairs that the engine itself cannot tell apart have no order.
    told = [(a, b) for a, b in pairs if abs(_share(a.engine) - _share(b.engine)) > CLOSE_POINTS / 100]
    same = sum(
        (_share(a.engine) > _share(b.engine)) == (_share(a.simulated) > _share(b.simulated)) for a, b in told
    )
    others = {a.policy: _share(a.simulated) for a in here if not a.is_served}
    text = (
        f"{close} of {len(real)} systems within {CLOSE_POINTS:g} points; {same} of {len(told)} pairs that "
        "are further apart in the same order."
    )
    if others:
        text += (
            f" Told every outcome, a policy attains {others[LIMIT]:.1%} in the simulator; ours attains "
            f"{others[TOLD]:.1%} where max_tokens tells it the end of every answer."
        )
    return text


def to_json(found: Sequence[Agreement]) -> list[Mapping[str, Any]]:
    """For programs."""
    return [
        {
            "point": a.point.id,
            "policy": a.policy,
            "engine": round(_share(a.engine), 5) if a.is_served else None,
            "simulated": round(_share(a.simulated), 5),
        }
        for a in found
    ]

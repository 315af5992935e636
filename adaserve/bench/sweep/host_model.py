"""The host as the simulator needs to know it, from what servers counted during a sweep's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import siegelslopes

from adaserve.bench.sweep.aggregate import Results
from adaserve.bench.sweep.kinds import KINDS
from adaserve.bench.sweep.plan import Point
from adaserve.bench.sweep.systems import length_of
from adaserve.bench.sweep.workload import uncached_tokens
from adaserve.scheduler.costs.latency import LatencyModel, StepCost, TabulatedCost
from adaserve.scheduler.interface import Context
from adaserve.scheduler.simulator.trees import SyntheticChildren, acceptance_of_chains
from adaserve.scheduler.simulator.workload import TextModel
from adaserve.slo.run_summary import RequestRecord

SIZES = np.array(
    [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0]
)


def in_order(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records by their arrival."""
    return sorted(records, key=lambda r: (r.scheduled_s, int(r.id)))


def lengths_of(ordered: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """Tokens of each prompt that are not cached, and of each answer."""
    whole = [_lengths(r, ordered) for r in ordered]
    read = uncached_tokens((r.session_id, *lengths) for r, lengths in zip(ordered, whole, strict=True))
    return [(max(1, n), output) for n, (_, output) in zip(read, whole, strict=True)]


def _lengths(record: RequestRecord, every: Sequence[RequestRecord]) -> tuple[int, int]:
    """Tokens of prompt and answer. Requests that failed say nothing of them, and get what their class has on
    average."""
    of = [record] if record.ok else [r for r in every if r.ok and r.slo_class == record.slo_class]
    prompt, output = (
        round(float(np.mean([getattr(r, f"{kind}_tokens") for r in of] or [1])))
        for kind in ("prompt", "output")
    )
    return max(1, prompt), max(1, output)


def shared_forwards(server: Mapping[str, Any] | None) -> bool:
    """Whether prompts were in the forwards of verifications, by what the server of a block counted."""
    return bool(server and server.get("mixed"))


def _counted(results: Results) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Lines of blocks whose servers counted decode iterations, with what they counted. Those of which it is
    not known what verified and what prompts took, as they shared forwards, only if there are no others."""
    lines = [line for line in results.lines.values() if line["server"] and line["server"]["iterations"]]
    known = [line for line in lines if not shared_forwards(line["server"])] or lines
    return [(line, line["server"]) for line in known]


def fitted_means(results: Results, kind: str | None = None) -> dict[str, float]:
    """How predictable each class is: the mean at which simulated chains accept what the engine's did.

    Every block of this ``kind`` of traffic that a chain played counts, also those that lengths were chosen
    on; if there are none, all blocks that chains played."""
    chains = [
        (Point.parse(line["point"]).kind, length, line["id"])
        for line in results.lines.values()
        if line["setting"].startswith("chain-") and (length := length_of(line["setting"])) is not None
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
    A straight line through the blocks, by what their servers counted; the profile's own if none did. It is
    one of repeated medians (Siegel), which a few blocks can't bend: in far overloaded ones the forwards of
    all iterations differ from those of the loops that ``loop_s`` is the mean of, since more requests run
    where prompts come in between."""
    rows, seconds = [], []
    for _, server in _counted(results):
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
    for line, server in _counted(results):
        total = line["all"]
        if not total["completed"]:
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
    table = TabulatedCost(tuple(sizes.tolist()), tuple(times.tolist()), *profile.verify.kv_read)
    return replace(profile, verify=table)


def prefills_as_served(profile: LatencyModel, results: Results) -> StepCost | None:
    """What forwards that read prompts take, target and draft: a line through what the servers counted, and no
    less than one token takes; None if none did. They are far larger than what `as_served` knows.

    Traces are left out: their prompts are drawn so often that many are cached, which nobody counts."""
    parts, served_s = [], []
    for line, server in _counted(results):
        kind = Point.parse(line["point"]).kind
        if not server.get("prefills") or not (kind is None or kind in KINDS):
            continue
        read = sum(n for n, _ in lengths_of(in_order(results.store.records(line["id"]))))
        parts.append((server["prefills"], read))
        served_s.append(server["seconds"]["prefill"])
    if not parts:
        return None
    each_s, token_s = nnls(np.array(parts, np.float64), np.array(served_s))[0]
    least = profile.verify.alone(SIZES[:1]) + profile.draft.alone(SIZES[:1])
    return TabulatedCost(tuple(SIZES.tolist()), tuple(np.maximum(least, each_s + token_s * SIZES).tolist()))


def _draft_as_served(profile: LatencyModel, results: Results) -> LatencyModel:
    """One factor for the start of a draft with its first step, and one for all further steps, by the blocks
    whose drafts have the same number of steps in every iteration. If these can't tell the two apart, as
    when all have one number, one factor for both."""
    parts, served_s, lengths = [], [], set()
    for line, server in _counted(results):
        steps = length_of(line["setting"])
        if steps is None:
            continue
        n = max(1, round(server["running"]))
        first_s = profile.draft_s(n, 1, 1)
        parts.append((first_s, profile.draft_s(n, steps, 1) - first_s))
        served_s.append(server["seconds"]["draft"] / server["iterations"])
        lengths.add(steps)
    if not any(served_s):
        return profile
    profiled, served = np.array(parts), np.array(served_s)
    first, later = nnls(profiled, served)[0] if len(lengths) > 1 else (0.0, 0.0)
    if not (first and later):
        first = later = nnls(profiled.sum(axis=1, keepdims=True), served)[0][0]
    start = profile.draft_first or profile.draft
    return replace(
        profile,
        draft=_scaled(profile.draft, later),
        draft_first=_scaled(start, first),
    )


def _scaled(cost: StepCost, factor: float) -> TabulatedCost:
    return TabulatedCost(tuple(SIZES.tolist()), tuple((factor * cost.alone(SIZES)).tolist()), *cost.kv_read)


def _fit(chains: Sequence[tuple[int, float]]) -> float:
    """The mean whose simulated tokens per verification are nearest; ``chains``: (length, tokens)."""
    children = SyntheticChildren()

    def off(mean: float) -> float:
        text = TextModel(other=mean)
        made = (acceptance_of_chains(children, text, k) for k, _ in chains)
        return float(sum((m - told) ** 2 for m, (_, told) in zip(made, chains, strict=True)))

    return min((round(0.01 * k, 2) for k in range(30, 95)), key=off)

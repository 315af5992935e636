"""``adaserve bench latency``: TPOT of policies against plain decoding, in turns on one server per draft.

A server runs all policies in turn, batch by batch, and so do the servers of several drafts, so that a machine
that slows down slows all of them. A batch is one ``/generate`` call with n held-out prompts; its TPOT is the
mean over its requests of the server's own decode time per token. The requests of a round are numbered alike
under every policy, so all of them serve the same texts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adaserve.bench import client
from adaserve.bench.client import Ask
from adaserve.bench.display import progress, table
from adaserve.bench.prompts import held_out, that_loop_least
from adaserve.bench.repetition import repetitive
from adaserve.bench.start_server import running_server
from adaserve.host.files import write_json
from adaserve.loadgen.results import provenance
from adaserve.pair.prompts import distinct_share
from adaserve.server import ServerProcess, ServerSpec
from adaserve.slo.run_summary import percent
from adaserve.terminal import say

BASE = "none"
SELF, SELF_WINDOW = "self", 256
"""A kind of draft: the target drafts for itself and reads this many recent tokens."""
MARGIN = 16
"""Places that a context keeps free after a request's last token, for candidates."""
SCREENED = 128
"""Prompts tried per temperature."""


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """What to measure."""

    policies: tuple[str, ...] = ("priced",)
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    rounds: int = 5
    tokens: int = 64
    seed: int = 0
    repetition: tuple[str, ...] = ()
    """Kinds of :mod:`adaserve.bench.repetition`; none = held-out text that is continued without loops."""
    contexts: tuple[int, ...] = (0,)
    """Tokens of prompt and answer together, of long held-out texts; 0 = short prompts as they are."""

    @property
    def flags(self) -> tuple[str, ...]:
        """SGLang's flags with which all of this fits into one server."""
        longest = max(self.contexts)
        if not longest:
            return ()
        slots = max(self.batches) * (longest + self.tokens)  # one more answer each stays cached
        return ("--context-length", str(longest), "--max-total-tokens", str(max(65_536, slots)))

    def steps(self, servers: int) -> int:
        """How many batches all servers get, plus one choice of prompts per temperature and context."""
        each = len(self.batches) * self.rounds * (1 + len(self.policies)) * servers
        return len(self.contexts) * len(self.temperatures) * (1 + each)


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch under one policy."""

    draft: str  # what kind
    policy: str
    batch: int
    temperature: float
    context: int
    round: int
    tpot_ms: float  # mean over the requests
    accept_length: float  # tokens per request and iteration, bonus included
    distinct_8grams: float  # share of the output's 8-grams; low = the text loops
    iteration_ms: float
    target_ms: float  # per iteration, in the target's forward
    draft_ms: float  # per iteration, in the draft's forwards
    python_share: float  # of the worker's iteration that is in neither model
    loop_ms: float  # from the end of one iteration to the end of the next: SGLang's own work included
    other_share: float  # of that time that is in neither model
    same: float = 1.0  # share of the answers that are those of plain decoding


def run_latency(specs: Mapping[str, ServerSpec], plan: LatencyPlan, path: Path, console: Console) -> None:
    """Starts a server for each kind of draft, measures, prints a table, writes JSON: of the rounds that were
    played, whatever ended it. Raises ServerError, and PairError if there is not enough held-out text."""
    made, samples = provenance(), list[Sample]()
    for context in filter(None, plan.contexts):
        _long(plan, context)  # refused now, not when its turn comes
    try:
        with ExitStack() as stack:
            servers = {
                kind: stack.enter_context(running_server(spec, path.with_name(f"server-{kind}.log"), console))
                for kind, spec in specs.items()
            }
            costs = {kind: server.report()["latency"] for kind, server in servers.items()}
            bar = stack.enter_context(progress(console))
            task = bar.add_task("measuring", total=plan.steps(len(servers)))
            for played in run(servers, plan, lambda what: bar.update(task, advance=1, description=what)):
                samples += played
    finally:
        if samples:
            save(path, made, samples, plan, costs)
            Console(width=None if sys.stdout.isatty() else 130).print(_table(summarize(samples, plan)))
            say(console, f"written to {path}")


def run(
    servers: Mapping[str, ServerProcess], plan: LatencyPlan, done: Callable[[str], None]
) -> Iterator[list[Sample]]:
    """Measures everything in ``plan``, round by round; ``done`` is told after each batch."""
    for context, temperature in product(plan.contexts, plan.temperatures):
        asks = _asks(next(iter(servers.values())), plan, temperature, context)
        done(f"T={temperature:g}: {len(asks)} prompts")
        for batch, turn in product(plan.batches, range(plan.rounds)):
            # Long prompts take long to read, so all rounds continue the same ones.
            first = 0 if context else turn * 37
            chosen = [asks[(first + i) % len(asks)] for i in range(batch)]
            played = []
            for kind in _in_turn(tuple(servers), turn):
                server = servers[kind]
                _prefill(server, plan, chosen, fresh=not context)
                made = {}
                for policy in _in_turn((BASE, *plan.policies), turn):
                    made[policy] = _measure(kind, server, policy, chosen, turn, context)
                    done(f"batch {batch}, T={temperature:g}, {kind}, {policy}")
                plain = made[BASE][1]
                for sample, texts in made.values():
                    same = sum(a == b for a, b in zip(texts, plain, strict=True)) / len(texts)
                    played.append(replace(sample, same=same))
            yield played


def _in_turn(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Every second round the other way round, so that nothing always comes first."""
    return names[::-1] if turn % 2 else names


def _asks(server: ServerProcess, plan: LatencyPlan, temperature: float, context: int) -> list[Ask]:
    if context:
        found = _long(plan, context)
    elif plan.repetition:
        found = repetitive(plan.repetition, SCREENED, plan.seed)
    else:
        found = _that_do_not_loop(server, plan, temperature)
    return [replace(ask, tokens=plan.tokens, temperature=temperature) for ask in found]


def _long(plan: LatencyPlan, context: int) -> list[Ask]:
    """Held-out texts for the largest batch, code and prose in turn, with room for an answer in the context;
    short ones are the beginnings of long ones. Raises PairError if there is not enough text."""
    from adaserve.pair.folders import weights_folder
    from adaserve.pair.long_context import CATEGORIES, long_prompts
    from adaserve.pair.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(weights_folder() / "target")
    count, tokens = max(plan.batches), context - plan.tokens - MARGIN
    rows = -(-count // len(CATEGORIES))
    texts = (long_prompts(tokenizer, category, rows, tokens).tolist() for category in CATEGORIES)
    return [Ask(text, tokens) for turn in zip(*texts, strict=True) for text in turn][:count]


def _that_do_not_loop(server: ServerProcess, plan: LatencyPlan, temperature: float) -> list[Ask]:
    """Held-out code and prose after which plain decoding does not repeat itself: loops inflate acceptance.
    If it nearly always does, those after which it does so least; the table says how much."""
    candidates = [Ask(text, plan.tokens, temperature) for text in held_out(plan.seed)[:SCREENED]]
    server.set_policy(BASE)
    outputs: list[list[int]] = []
    for start in range(0, len(candidates), 32):
        answers = client.batch(server.url, candidates[start : start + 32])
        outputs += [a["output_ids"] for a in answers]
    return [candidates[k] for k in that_loop_least(outputs)]


def _prefill(server: ServerProcess, plan: LatencyPlan, asks: Sequence[Ask], fresh: bool) -> None:
    """Puts the prompts into both KV caches, emptied if ``fresh``, so that what follows is decoding alone."""
    server.set_policy(plan.policies[0] if plan.policies else BASE)
    if fresh:
        server.drain()
    client.batch(server.url, [replace(ask, tokens=1, temperature=0.0) for ask in asks])


def _measure(
    kind: str, server: ServerProcess, policy: str, asks: Sequence[Ask], turn: int, context: int
) -> tuple[Sample, list[Any]]:
    """The sample, and the tokens of every answer."""
    server.set_policy(policy)
    server.number_requests(turn * len(asks))
    before = server.report()["times"]
    answers = client.batch(server.url, asks)
    after = server.report()["times"]
    spent = {k: after[k] - before[k] for k in after}
    n = max(1.0, spent["iterations"])
    meta = [a["meta_info"] for a in answers]
    verifications = sum(m["spec_verify_ct"] for m in meta)
    models_s = spent["target_s"] + spent["draft_s"]
    loop_ms = spent["loop_s"] / max(1.0, spent["loops"]) * 1e3
    sample = Sample(
        draft=kind,
        policy=policy,
        batch=len(asks),
        temperature=asks[0].temperature,
        context=context,
        round=turn,
        tpot_ms=statistics.mean(m["slo"]["tpot_ms"] for m in meta),
        accept_length=sum(m["completion_tokens"] - 1 for m in meta) / max(1, verifications),
        distinct_8grams=statistics.mean(distinct_share(a["output_ids"]) for a in answers),
        iteration_ms=spent["decode_s"] / n * 1e3,
        target_ms=spent["target_s"] / n * 1e3,
        draft_ms=spent["draft_s"] / n * 1e3,
        python_share=1.0 - models_s / max(spent["decode_s"], 1e-9),
        loop_ms=loop_ms,
        other_share=1.0 - models_s / n * 1e3 / max(loop_ms, 1e-6),
    )
    return sample, [a["output_ids"] for a in answers]


_MEDIANS = (
    "accept_length", "distinct_8grams", "iteration_ms", "target_ms", "draft_ms", "python_share", "loop_ms",
    "other_share",
)  # fmt: skip


def summarize(samples: Sequence[Sample], plan: LatencyPlan) -> list[dict[str, Any]]:
    """One row per context, temperature, batch, draft and policy: medians, and the speed-up paired by rounds.

    ``over_first_draft``: the speed-up over the first draft under the same policy.
    """
    kinds = list(dict.fromkeys(s.draft for s in samples))
    rows = []
    for context, temperature, batch in product(plan.contexts, plan.temperatures, plan.batches):
        case = (context, temperature, batch)
        of = [s for s in samples if (s.context, s.temperature, s.batch) == case]
        if not of:
            continue
        for kind, policy in product(kinds, (BASE, *plan.policies)):
            mine = [s for s in of if s.draft == kind and s.policy == policy]
            ratios = _speedups([s for s in of if s.draft == kind and s.policy == BASE], mine)
            over_first = _speedups([s for s in of if s.draft == kinds[0] and s.policy == policy], mine)
            rows.append(
                {
                    "context": context,
                    "temperature": temperature,
                    "batch": batch,
                    "draft": kind,
                    "policy": policy,
                    "tpot_ms": statistics.median(s.tpot_ms for s in mine),
                    "speedup": statistics.median(ratios),
                    "speedup_range": [ratios[0], ratios[-1]],
                    "same": statistics.mean(s.same for s in mine),
                    "over_first_draft": statistics.median(over_first),
                    **{k: statistics.median(getattr(s, k) for s in mine) for k in _MEDIANS},
                }
            )
    return rows


def _speedups(base: Sequence[Sample], mine: Sequence[Sample]) -> list[float]:
    """Ascending, of the same rounds."""
    tpot = {s.round: s.tpot_ms for s in base}
    return sorted(tpot[s.round] / s.tpot_ms for s in mine)


def save(
    path: Path,
    made: Mapping[str, Any],
    samples: Sequence[Sample],
    plan: LatencyPlan,
    costs: Mapping[str, Any],
) -> None:
    """Writes everything that is needed to judge and to repeat the measurement."""
    body = {
        "schema_version": 3,
        "kind": "bench latency",
        "made": made,
        "plan": asdict(plan),
        "latency_models": costs,
        "summary": summarize(samples, plan),
        "samples": [asdict(s) for s in samples],
    }
    write_json(path, body)


def _table(rows: list[dict[str, Any]]) -> Table:
    heads = (
        "context", "T", "batch", "draft", "policy", "TPOT ms", "speed-up", "(range)", "vs first", "tok/iter",
        "worker", "other", "distinct", "same",
    )  # fmt: skip
    made = table("decode latency, in turns with plain decoding", heads, left=("draft", "policy"))
    for r in rows:
        low, high = r["speedup_range"]
        made.add_row(
            str(r["context"] or "short"),
            f"{r['temperature']:g}",
            str(r["batch"]),
            r["draft"],
            r["policy"],
            f"{r['tpot_ms']:.2f}",
            f"{r['speedup']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{r['over_first_draft']:.2f}x",
            f"{r['accept_length']:.2f}",
            f"{r['python_share']:.0%}",
            f"{r['other_share']:.0%}",
            f"{r['distinct_8grams']:.0%}",
            f"{percent(r['same'], 0)}%",
        )
    made.caption = (
        "vs first: speed-up over the first draft and the same policy; worker: share of AdaServe's iteration "
        "outside both models; other: of the time from one iteration to the next, SGLang's own work included; "
        "distinct: different 8-grams over all of the output (below 90% it loops, flattering drafts); same: "
        "answers as in plain decoding"
    )
    return made

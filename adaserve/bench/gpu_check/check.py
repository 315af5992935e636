"""Exactness, speed and mixed SLOs on three servers, judged against the project's targets."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from adaserve.bench.gpu_check import answers
from adaserve.bench.gpu_check.answers import Answer
from adaserve.bench.gpu_check.figures import draw
from adaserve.bench.gpu_check.mixed import run_mixed
from adaserve.bench.gpu_check.servers import ADASERVE, PLAIN, STANDALONE, Pair, serving
from adaserve.bench.prompts import held_out
from adaserve.bench.terminal import progress
from adaserve.loadgen.results import provenance
from adaserve.server import ServerError, ServerProcess

Sections = dict[str, Callable[[ServerProcess], None]]
"""What is measured on one server, by name, in order."""

STATE_FILE = "gpu-check.state.json"
NOT_SHOWN_ON_CPU = (
    "speed: the tiny pair on SDPA is bound by Python, so TPOT, price of verification, the share outside "
    "of the models and goodput mean nothing",
    "FlashInfer, CUDA graphs and their memory: no kernel of a GPU ran",
    "SGLang's own STANDALONE speculation: it needs Triton, so its server does not start and is skipped",
)

NONE = "none"
MIXED_POLICIES = ("priced", "adaserve", "chain-4", NONE)
SPECULATING = ("priced", "adaserve")
"""Policies that the targets apply to; the default one first."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What to run."""

    batches: tuple[int, ...] = (1, 8, 32, 64)
    policies: tuple[str, ...] = ("priced", "adaserve")
    tokens: int = 128
    rounds: int = 3
    exact_prompts: int = 64
    mixed_s: float = 60.0
    loads: tuple[float, ...] = (0.5, 0.9, 1.3)  # requests offered, as shares of plain decoding's capacity
    tie_margin: float = 0.15
    """Two best log-probabilities closer than that may swap with the shapes of kernels (bf16, fp16)."""
    seed: int = 0


@dataclass
class Findings:
    """Everything that was measured; JSON values. None = not measured, with the reason in ``skipped``."""

    exact: dict[str, Any] = field(default_factory=dict)  # by server or policy
    tpot_ms: dict[str, dict[int, float]] = field(default_factory=dict)  # by server or policy, by batch
    details: dict[str, Any] = field(default_factory=dict)  # iterations of the AdaServe server
    mixed: dict[str, Any] = field(default_factory=dict)  # by load, by server or policy
    skipped: dict[str, str] = field(default_factory=dict)
    latency_model: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    baseline_ms: float | None = None
    reference: list[Answer] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # sections, "server: section"


class Check:
    """One run of ``adaserve gpu-check``."""

    def __init__(self, pair: Pair, plan: CheckPlan, out: Path, console: Console) -> None:
        self.pair, self.plan, self.out, self.console = pair, plan, out, console
        self.found = Findings()
        self._prompts: list[list[int]] = []

    def run(self) -> dict[str, Any]:
        """Runs what is still to be done, writes ``out`` after every section; returns the report.

        Raises ServerError, PairError.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self.found = resume(self.out, self._identity())
        if self.found.done:
            self.console.print(f"{len(self.found.done)} sections are there already: {self.out}")
        self._prompts = _prompts(
            self.pair.target, max(*self.plan.batches, self.plan.exact_prompts), self.plan.seed
        )
        self._on(PLAIN, self._plain())
        self._on(ADASERVE, self._adaserve())
        self._on(STANDALONE, self._standalone(), optional=True)
        report = self._save()
        draw(report, self.out)
        return report

    def _on(self, kind: str, sections: Sections, optional: bool = False) -> None:
        """Starts a server of ``kind`` and runs those of its sections that were not run before."""
        left = [(name, run) for name, run in sections.items() if f"{kind}: {name}" not in self.found.done]
        if not left:
            return
        self.console.print(f"[bold]{kind}[/]")
        try:
            with serving(self.pair, kind, self.out / f"{kind}.log", self.console) as server:
                self.found.skipped.pop(kind, None)
                for name, run in left:
                    run(server)
                    self.found.done.append(f"{kind}: {name}")
                    self._save()
        except (ServerError, httpx.HTTPError) as error:
            if not optional:
                raise
            self.found.skipped[kind] = _reason(error)
            self.console.print(f"skipped: {self.found.skipped[kind]}", highlight=False, soft_wrap=True)

    # -- the three servers ----------------------------------------------------------------------

    def _plain(self) -> Sections:
        return {"exactness": self._reference_outputs, "speed": lambda s: self._speed(s, [PLAIN])}

    def _adaserve(self) -> Sections:
        p = self.plan
        sections: Sections = {"exactness": self._policies_outputs}
        sections["speed"] = partial(self._speed, names=(*p.policies, NONE), switch=True)
        sections["verification"] = self._verification_cost
        for policy in MIXED_POLICIES if p.mixed_s > 0 else ():
            sections[f"mixed SLOs with {policy}"] = partial(self._mixed, name=policy, policy=policy)
        return sections

    def _standalone(self) -> Sections:
        sections: Sections = {
            "exactness": lambda s: self._outputs(s, STANDALONE),
            "speed": lambda s: self._speed(s, [STANDALONE]),
        }
        if self.plan.mixed_s > 0:
            sections["mixed SLOs"] = lambda s: self._mixed(s, STANDALONE)
        return sections

    def _reference_outputs(self, server: ServerProcess) -> None:
        p = self.plan
        prompts = self._prompts[: p.exact_prompts]
        self.found.reference = answers.generate(server.url, prompts, p.tokens, margins=True)
        # Alone instead of in a batch: how often SGLang's own output differs with other shapes.
        alone = [answers.generate(server.url, [q], p.tokens)[0] for q in prompts[: min(8, len(prompts))]]
        self.found.exact[f"{PLAIN}, one by one"] = self._compare(alone)

    def _policies_outputs(self, server: ServerProcess) -> None:
        state = server.report()
        self.found.latency_model, self.found.device = state["latency"], state.get("device", {})
        self.found.baseline_ms = state["baseline_ms"]
        for policy in (*self.plan.policies, "chain-4", NONE):
            server.set_policy(policy)
            server.drain()
            self._outputs(server, policy)

    def _outputs(self, server: ServerProcess, name: str) -> None:
        prompts = self._prompts[: self.plan.exact_prompts]
        self.found.exact[name] = self._compare(answers.generate(server.url, prompts, self.plan.tokens))

    # -- measurements ---------------------------------------------------------------------------

    def _compare(self, given: Sequence[Answer]) -> dict[str, Any]:
        """Outputs against the reference; a difference counts as a tie where the reference was undecided."""
        same, ties, different = 0, 0, []
        for i, (answer, right) in enumerate(zip(given, self.found.reference, strict=False)):
            at = answers.first_difference(answer.output_ids, right.output_ids)
            if at is None:
                same += 1
            elif right.margins[at] < self.plan.tie_margin:
                ties += 1
            else:
                different.append({"prompt": i, "token": at, "margin": round(right.margins[at], 4)})
        return {"requests": len(given), "identical": same, "ties": ties, "different": different}

    def _speed(self, server: ServerProcess, names: Sequence[str], switch: bool = False) -> None:
        """TPOT by batch; ``switch``: the names are policies, which take turns."""
        p, n = self.plan, len(self._prompts)
        with progress(self.console) as bar:
            task = bar.add_task("TPOT", total=len(p.batches) * p.rounds * len(names))
            for batch in p.batches:
                samples: dict[str, list[float]] = {name: [] for name in names}
                spent: dict[str, dict[str, float]] = {name: {} for name in names}
                for turn in range(p.rounds):
                    prompts = [self._prompts[(turn * 37 + i) % n] for i in range(batch)]
                    for name in names:
                        if switch:
                            server.set_policy(name)
                        before, start_s = _times(server, name), time.perf_counter()
                        samples[name].append(answers.tpot_ms(server.url, prompts, p.tokens))
                        if before is not None:
                            now = _spent(before, server.report()["times"])
                            now["wall_s"] = time.perf_counter() - start_s
                            spent[name] = {k: v + spent[name].get(k, 0.0) for k, v in now.items()}
                        bar.update(task, advance=1, description=f"{name}: batch {batch}")
                for name in names:
                    self.found.tpot_ms.setdefault(name, {})[batch] = statistics.median(samples[name])
                    if spent[name]:
                        self.found.details.setdefault(name, {})[batch] = spent[name]

    def _verification_cost(self, server: ServerProcess) -> None:
        """Device time of verifying 64 tokens (16 requests, chains of 3) and of 64 plainly decoded ones."""
        costs = {}
        rows = 64 if max(self.plan.batches) >= 64 else 4 * max(1, max(self.plan.batches) // 4)
        for policy, batch in (("chain-3", rows // 4), (NONE, rows)):
            server.set_policy(policy)
            before = server.report()["times"]
            answers.generate(server.url, self._prompts[:batch], self.plan.tokens)
            spent = _spent(before, server.report()["times"])
            costs[policy] = spent["target_s"] / max(1.0, spent["iterations"]) * 1e3
        self.found.details["verification"] = {
            "tokens": rows, "verify_ms": costs["chain-3"], "decode_ms": costs[NONE],
            "ratio": costs["chain-3"] / costs[NONE] if costs[NONE] else None,
        }  # fmt: skip

    def _mixed(self, server: ServerProcess, name: str, policy: str | None = None) -> None:
        if policy is not None:
            server.set_policy(policy)
        assert self.found.baseline_ms is not None  # AdaServe's server came first
        busiest = max(self.found.tpot_ms[PLAIN])
        capacity_tps = busiest / self.found.tpot_ms[PLAIN][busiest] * 1e3
        for load in self.plan.loads:
            folder = self.out / f"mixed-{load:g}" / name
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            summary = run_mixed(
                server, folder, capacity_tps * load, self.plan.mixed_s,
                self.found.baseline_ms, self.plan.seed, self.console,
            )  # fmt: skip
            self.found.mixed.setdefault(f"{load:g}", {})[name] = summary
            server.drain()

    def _identity(self) -> dict[str, Any]:
        """What results must have in common to belong to one report; JSON values."""
        pair = asdict(replace(self.pair, target=_name(self.pair.target), draft=_name(self.pair.draft)))
        pair["config"] = self.pair.config.model_dump()
        return dict(json.loads(json.dumps({"pair": pair, "plan": asdict(self.plan)})))

    def _save(self) -> dict[str, Any]:
        """The report so far, and what another run needs to continue."""
        dry = self.pair.device == "cpu"
        found = asdict(self.found)
        kept = {"identity": self._identity(), "found": found}
        _write(self.out / STATE_FILE, kept)
        report = {
            "schema_version": 3,
            "kind": "gpu-check",
            "dry_run": dry,
            "does_not_show": list(NOT_SHOWN_ON_CPU) if dry else [],
            "made": provenance(),
            "gpu": _gpu(),
            **self._identity(),
            **{k: v for k, v in found.items() if k != "reference"},
            "targets": targets(self.found, dry),
        }
        _write(self.out / "gpu-check.json", report)
        return report


def resume(out: Path, identity: dict[str, Any]) -> Findings:
    """What an interrupted run of the same check left in ``out``. Raises ServerError for another check's."""
    path = out / STATE_FILE
    if not path.exists():
        return Findings()
    kept = json.loads(path.read_text())
    if kept["identity"] != identity:
        raise ServerError(f"{out} holds the check of another pair or plan: give another --out, or remove it")
    found = Findings(**kept["found"])
    found.reference = [
        Answer(tuple(a["output_ids"]), a["seconds"], tuple(a["margins"])) for a in kept["found"]["reference"]
    ]
    for table in (found.tpot_ms, found.details):
        for name, values in table.items():
            if name != "verification":  # JSON has no numbers for keys
                table[name] = {int(batch): value for batch, value in values.items()}
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, so that an interrupted run leaves the last good file."""
    partial_ = path.with_suffix(".partial")
    partial_.write_text(json.dumps(value, indent=1) + "\n")
    partial_.replace(path)


def _reason(error: Exception) -> str:
    """The line of a server's error that says why it ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else str(error)


def targets(found: Findings, dry: bool = False) -> list[dict[str, Any]]:
    """The project's targets on a GPU host, and whether each was met; None where it was not measured.

    ``dry``: on a CPU, where the measured speed means nothing: only exactness can be met or missed.
    """
    tpot, rows = found.tpot_ms, []

    def add(what: str, value: float | None, holds: bool | None, timed: bool = True) -> None:
        holds = None if dry and timed else holds
        rows.append({"target": what, "value": None if value is None else round(value, 4), "met": holds})

    ours = {k: v for k, v in found.exact.items() if not k.startswith(PLAIN)}
    wrong = sum(len(v["different"]) for v in ours.values())
    add(
        "greedy outputs that differ from SGLang's other than by ties: 0",
        wrong,
        wrong == 0 if ours else None,
        False,
    )
    ours_ms = min((tpot[p][1] for p in SPECULATING if 1 in tpot.get(p, {})), default=None)
    speedup = _ratio(tpot.get(PLAIN, {}).get(1), ours_ms)
    add("TPOT at batch 1 at least 2x better than without speculation", speedup, _at_least(speedup, 2.0))
    ratio = found.details.get("verification", {}).get("ratio")
    add("verification within 1.15x of as many plainly decoded tokens", ratio, _at_most(ratio, 1.15))
    shares = [_other_share(found.details.get(p, {}).get(32)) for p in SPECULATING]
    share = next((s for s in shares if s is not None), None)
    add("time outside of both models below 5% at batch 32", share, _at_most(share, 0.05))
    highest = max(found.mixed, key=float, default=None)
    goodput = {} if highest is None else {k: v["token_goodput"] for k, v in found.mixed[highest].items()}
    best = max((goodput[p] for p in SPECULATING if p in goodput), default=None)
    gain = _ratio(best, goodput.get(STANDALONE))
    add("goodput at the highest load above SGLang's own speculation", gain, _at_least(gain, 1.0))
    return rows


def _other_share(spent: dict[str, float] | None) -> float | None:
    if not spent or not spent["decode_s"]:
        return None
    return 1.0 - (spent["target_s"] + spent["draft_s"]) / spent["decode_s"]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _at_least(value: float | None, bound: float) -> bool | None:
    return None if value is None else value >= bound


def _at_most(value: float | None, bound: float) -> bool | None:
    return None if value is None else value <= bound


def _times(server: ServerProcess, name: str) -> dict[str, float] | None:
    return None if name in (PLAIN, STANDALONE) else server.report()["times"]


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {k: after[k] - before[k] for k in after}


def _prompts(model: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of held-out code and prose of 30 to 300 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer.encode(t)) for t in held_out(seed)[:count]]


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(0)
    return {
        "name": p.name,
        "memory_gib": round(p.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
    }


def _name(path: str) -> str:
    return Path(path).name if Path(path).is_dir() else path

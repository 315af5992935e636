"""Exactness, speed, profiles and mixed SLOs on four servers, in stages that save as they go."""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from adaserve.bench.display import progress
from adaserve.bench.gpu_check import answers
from adaserve.bench.gpu_check.answers import Answer, Pace
from adaserve.bench.gpu_check.facts import gpu, packages
from adaserve.bench.gpu_check.findings import (
    SCHEMA_VERSION,
    STATE_FILE,
    CheckPlan,
    Findings,
    code_digest,
    resume,
)
from adaserve.bench.gpu_check.goals import targets
from adaserve.bench.gpu_check.mixed import run_mixed
from adaserve.bench.gpu_check.rerun import forget
from adaserve.bench.gpu_check.systems import (
    ADASERVE,
    NONE,
    OWN,
    PLAIN,
    POLICIES,
    SPECULATING,
    Pair,
    StartedAhead,
    serving,
)
from adaserve.bench.gpu_check.torch_profiles import profile
from adaserve.bench.gpu_check.verification import target_ms
from adaserve.bench.prompts import held_out, that_loop_least
from adaserve.config import AdaServeConfig
from adaserve.errors import UserError
from adaserve.host.files import write_json
from adaserve.loadgen.results import provenance
from adaserve.pair.prompts import distinct_share
from adaserve.server import ServerError, ServerProcess
from adaserve.terminal import say

Sections = dict[str, Callable[[ServerProcess], None]]
"""What is measured on one server, by name, in order."""

NOT_SHOWN_ON_CPU = (
    "speed: the tiny pair on SDPA is bound by Python, so TPOT, price of verification, the share outside "
    "of the models and goodput mean nothing",
    "FlashInfer, CUDA graphs and their memory: no kernel of a GPU ran",
    "SGLang's own speculation: it needs Triton, so its server does not start and is skipped",
)

NOT_SHOWN_WITHOUT_GRAPHS = (
    "speed as it is served: no server had CUDA graphs, so launches may take most of the time",
)
STAGE_LIMIT_S = 900.0
TIE_NOISE, MIN_TIE = 3.0, 1e-3
"""A margin below so many times the noise may be a tie, and one below the other bound is."""
MAX_IDLE = 2
"""Servers of a kind that may die before any stage was done: the next one would most likely, too."""
ALONE = 8
"""Prompts that are also asked one by one."""
MAX_SAID = 600
"""Characters of a reason: what says most stands last in a log."""


class StageError(UserError):
    """A stage needs what another one finds, or there is no such stage; the message says which."""


class Check:
    """One run of ``adaserve gpu-check``."""

    def __init__(
        self,
        pair: Pair,
        plan: CheckPlan,
        out: Path,
        console: Console,
        only: Sequence[str] = (),
        limit_s: float = STAGE_LIMIT_S,
        again: bool = False,
        together: bool = False,
    ) -> None:
        """``only``: "server" or "server:stage", all without; ``limit_s``: of one stage, and of a server's
        start; ``again``: also what is done; ``together``: servers start side by side."""
        self.pair, self.plan, self.out, self.console = pair, plan, out, console
        self.limit_s = limit_s
        self.found = Findings()
        self._prompts: list[list[int]] = []
        self._code = code_digest()
        self._running: str | None = None  # stage
        self._servers: dict[str, Sections] = {
            PLAIN: self._plain(),
            ADASERVE: self._adaserve(),
            **{kind: self._own(kind) for kind in OWN},
        }
        self._only = self._chosen(only)
        self._again = set(self._only) if again else set()  # what has old results still
        self._together = together
        self._early: dict[str, StartedAhead] = {}

    def _chosen(self, only: Sequence[str]) -> set[str]:
        """Stages, "server:stage". Raises StageError."""
        every = [f"{kind}:{name}" for kind, sections in self._servers.items() for name in sections]
        for word in only:
            if not any(stage == word or stage.startswith(f"{word}:") for stage in every):
                raise StageError(f"there is no stage {word!r}; known are {', '.join(every)}")
        return {s for s in every if not only or any(s == w or s.startswith(f"{w}:") for w in only)}

    def run(self) -> dict[str, Any]:
        """Runs what is still to be done; returns the report.

        Writes ``out`` after every stage, and within one after every batch size, policy and load: a stage that
        was interrupted resumes after what it has saved. One that fails, or takes too long, is written down,
        and the next one runs. What other runs have left in ``out`` belongs to the same check: Raises
        ServerError where it does not.
        """
        self.found = resume(self.out, self._identity())
        self.out.mkdir(parents=True, exist_ok=True)
        self._keep()  # the folder is this check's from now on
        if self.found.done:
            say(self.console, f"{len(self.found.done)} stages are there already: {self.out}")
        self._prompts = _prompts(
            self.pair.target, max(*self.plan.batches, self.plan.exact_prompts), self.plan.seed
        )
        every = {kind: self._left(kind) for kind in self._servers}
        with ExitStack() as stack:
            if self._together:
                kinds = [kind for kind, left in every.items() if left]
                # While it starts AdaServe measures what forwards cost.
                self._start([kind for kind in kinds if kind != ADASERVE], stack)
                self._start([kind for kind in kinds if kind == ADASERVE], stack)
            for kind, left in every.items():
                idle = 0
                while left and idle < MAX_IDLE and (done := self._on(kind, left)) is not None:
                    idle += not done
                if left and idle == MAX_IDLE:
                    self.found.skipped[kind] = f"{idle} servers ended, each before any stage was done"
        return self._save()

    def _left(self, kind: str) -> Sections:
        """Stages on a server of ``kind`` that are asked for and not done."""
        return {
            name: run
            for name, run in self._servers[kind].items()
            if (stage := f"{kind}:{name}") in self._only
            and (stage in self._again or stage not in self.found.done)
        }

    def _start(self, kinds: Sequence[str], stack: ExitStack) -> None:
        """Starts servers side by side, each of which ends at the end of ``stack`` if not before. Returns when
        all of them answer or have failed: one that starts would disturb what is measured on another."""
        quiet = Console(quiet=True)  # a terminal shows one at a time
        for kind in kinds:
            server = serving(self.pair, kind, self._log(kind), quiet, self.limit_s)
            stack.push(early := StartedAhead(server))
            self._early[kind] = early
        with self.console.status(f"starting {', '.join(kinds)}"):
            for early in self._early.values():
                early.ready.wait()

    def _log(self, kind: str) -> Path:
        return self.out / f"{kind}.log"

    def _server(self, kind: str) -> AbstractContextManager[ServerProcess]:
        """The one that was started early, or another one."""
        if (early := self._early.pop(kind, None)) is not None:
            return early
        return serving(self.pair, kind, self._log(kind), self.console, self.limit_s)

    @property
    def undone(self) -> list[str]:
        """Stages that were asked for and gave nothing: they failed, or their server did not start. Of a dry
        run without those of servers that need a GPU."""
        needs_gpu = OWN if self.pair.device == "cpu" else ()
        left = self._only - set(self.found.done)
        return sorted(stage for stage in left if stage.partition(":")[0] not in needs_gpu)

    def _on(self, kind: str, left: Sections) -> int | None:
        """Starts a server of ``kind`` and takes stages off ``left`` as they are run. How many of them were
        done, or None when no server can be had. Returns early when the server died with a stage."""
        done = 0
        self.console.print(f"[bold]{kind}[/]")
        try:
            with self._server(kind) as server:
                if kind == ADASERVE:
                    self._look_at(server)
                self.found.skipped.pop(kind, None)
                for name in list(left):
                    done += self._stage(f"{kind}:{name}", left.pop(name), server)
                    self._save()
                    if not server.alive:
                        break
        except Exception as error:  # whatever it is, the next server may still tell something
            self.found.skipped[kind] = _reason(error)
            say(self.console, f"skipped: {self.found.skipped[kind]}")
            self._save()
            return None
        return done

    def _stage(self, stage: str, run: Callable[[ServerProcess], None], server: ServerProcess) -> bool:
        """Whether it is done."""
        start_s = time.monotonic()
        if stage in self._again:  # not before: a server that does not start must not cost what is there
            self._forget(stage)
        # A server that hangs would hold up its clients for as long as they wait; one that is gone does not.
        timer = threading.Timer(self.limit_s, server.give_up)
        timer.start()
        self._running = stage
        try:
            run(server)
        except Exception as error:  # whatever it is, the next stage may still tell something
            late = time.monotonic() - start_s >= self.limit_s
            reason = f"took longer than {self.limit_s:.0f} s" if late else _reason(error)
            self.found.failed[stage] = reason
            self.console.print(f"[red]{stage} failed:[/] {escape(reason)}", highlight=False, soft_wrap=True)
        else:
            self.found.failed.pop(stage, None)
            self.found.done.append(stage)
            self._note_code(stage)
            self.console.print(f"{stage}: {time.monotonic() - start_s:.0f} s", highlight=False)
        finally:
            self._running = None
            timer.cancel()
        return stage in self.found.done

    def _forget(self, stage: str) -> None:
        gone = forget(self.found, stage)
        self._again -= gone
        if others := sorted(gone - {stage}):
            said = f"{stage} is measured again, so these are no longer done: {', '.join(others)}"
            say(self.console, said)
        self._save()

    def _note_code(self, stage: str) -> None:
        if self._code not in (codes := self.found.code.setdefault(stage, [])):
            codes.append(self._code)

    def _look_at(self, server: ServerProcess) -> None:
        """What the first AdaServe server says of itself.

        Raises ServerError where another kernel serves than before: FlashInfer may compile in one run alone.
        """
        state = server.report()
        device, before = state.get("device", {}), self.found.device
        if differs := [k for k in ("attention", "captured") if before and device.get(k) != before.get(k)]:
            raise ServerError("\n".join([
                "results of servers that differ do not belong to one check",
                *(f"{k} is {device.get(k)} now, and was {before.get(k)} before: give another --out"
                  for k in differs),
            ]))  # fmt: skip
        if not before:
            self.found.latency_model, self.found.device = state["latency"], device

    # -- the servers ----------------------------------------------------------------------------

    def _plain(self) -> Sections:
        return {"exactness": self._reference_outputs, "speed": lambda s: self._speed(s, [PLAIN])}

    def _adaserve(self) -> Sections:
        sections: Sections = {"exactness": self._policies_outputs}
        sections["speed"] = partial(self._speed, names=(*SPECULATING, NONE), switch=True)
        sections["verification"] = self._verification_cost
        sections["profile"] = self._profiles
        for policy in POLICIES if self.plan.mixed_s > 0 else ():
            sections[f"mixed-{policy}"] = partial(self._mixed, name=policy, policy=policy)
        return sections

    def _own(self, kind: str) -> Sections:
        sections: Sections = {
            "exactness": lambda s: self._outputs(s, kind),
            "speed": lambda s: self._speed(s, [kind]),
        }
        if self.plan.mixed_s > 0:
            sections["mixed"] = lambda s: self._mixed(s, kind)
        return sections

    def _reference_outputs(self, server: ServerProcess) -> None:
        p = self.plan
        prompts = self._prompts[: p.exact_prompts]
        if not self.found.reference:  # others may have been compared with it
            self.found.reference = answers.generate(server.url, prompts, p.tokens, margins=True)
        # Alone instead of in a batch: how much SGLang's own output differs with other shapes.
        alone = [answers.generate(server.url, [q], p.tokens, margins=True)[0] for q in prompts[:ALONE]]
        self.found.margin_noise = answers.margin_noise(alone, self.found.reference)
        self.found.exact[f"{PLAIN}, one by one"] = self._compare(alone)

    def _policies_outputs(self, server: ServerProcess) -> None:
        for policy in POLICIES:
            if policy not in self.found.exact:
                server.set_policy(policy)
                server.drain()
                self._outputs(server, policy)
                self._save()

    def _outputs(self, server: ServerProcess, name: str) -> None:
        if not self.found.reference:
            raise StageError(f"there is nothing to compare with: run {PLAIN}:exactness first")
        prompts = self._prompts[: self.plan.exact_prompts]
        self.found.exact[name] = self._compare(answers.generate(server.url, prompts, self.plan.tokens))

    # -- measurements ---------------------------------------------------------------------------

    def _compare(self, given: Sequence[Answer]) -> dict[str, Any]:
        """Outputs against the reference; a difference counts as a tie where the reference was undecided."""
        same, ties, different = 0, list[float](), list[dict[str, Any]]()
        most = max(MIN_TIE, TIE_NOISE * (self.found.margin_noise or 0.0))
        for i, (answer, right) in enumerate(zip(given, self.found.reference, strict=False)):
            at = answers.first_difference(answer.output_ids, right.output_ids)
            if answer.output_ids == right.output_ids:
                same += 1
            elif at is None:  # one broke off: all are asked for as many tokens
                end = min(len(answer.output_ids), len(right.output_ids))
                different.append({"prompt": i, "token": end, "margin": None})
            elif right.margins[at] < most:
                ties.append(right.margins[at])
            else:
                different.append({"prompt": i, "token": at, "margin": round(right.margins[at], 4)})
        widest = round(max(ties), 4) if ties else None
        return {"requests": len(given), "identical": same, "ties": len(ties), "widest_tie": widest,
                "tie_margin": round(most, 4), "different": different}  # fmt: skip

    def _speed(self, server: ServerProcess, names: Sequence[str], switch: bool = False) -> None:
        """TPOT by batch; ``switch``: the names are policies, which take turns."""
        p, chosen = self.plan, self._that_loop_least()
        left = [b for b in p.batches if any(b not in self.found.tpot_ms.get(name, {}) for name in names)]
        drafts = {name: name not in (PLAIN, NONE) for name in names}
        with progress(self.console) as bar:
            total = sum(p.turns(batch, drafts[name]) for batch in left for name in names)
            task = bar.add_task("TPOT", total=total)
            for batch in left:
                samples: dict[str, list[Pace]] = {name: [] for name in names}
                spent: dict[str, dict[str, float]] = {name: {} for name in names}
                for turn, name in product(range(p.turns(batch, any(drafts.values()))), names):
                    if turn >= p.turns(batch, drafts[name]):
                        continue
                    prompts = [chosen[(turn * batch + i) % len(chosen)] for i in range(batch)]
                    if switch:
                        server.set_policy(name)
                    if name == names[0]:
                        answers.generate(server.url, prompts, 1)  # then they are cached for all names
                    before, start_s = _times(server, name), time.perf_counter()
                    samples[name].append(answers.pace(server.url, prompts, p.tokens))
                    if before is not None:
                        now = _spent(before, server.report()["times"])
                        now["wall_s"] = time.perf_counter() - start_s
                        spent[name] = {k: v + spent[name].get(k, 0.0) for k, v in now.items()}
                    bar.update(task, advance=1, description=f"{name}: batch {batch}")
                for name in names:
                    self.found.tpot_ms.setdefault(name, {})[batch] = statistics.median(
                        s.ms for s in samples[name]
                    )
                    if lengths := [s.accept_length for s in samples[name] if s.accept_length is not None]:
                        self.found.accept_length.setdefault(name, {})[batch] = statistics.median(lengths)
                    if spent[name]:
                        self.found.details.setdefault(name, {})[batch] = spent[name]
                self._save()

    def _that_loop_least(self) -> list[list[int]]:
        """Prompts after which SGLang repeats itself least, the same for all servers. A small model loops in
        greedy text, and a draft guesses loops far better than anything else."""
        outputs = [answer.output_ids for answer in self.found.reference]
        if not self.found.places:
            self.found.places = that_loop_least(outputs) if outputs else list(range(len(self._prompts)))
        if outputs:
            shares = [distinct_share(outputs[k]) for k in self.found.places if k < len(outputs)]
            self.found.distinct_8grams = statistics.mean(shares)
        return [self._prompts[k] for k in self.found.places]

    def _verification_cost(self, server: ServerProcess) -> None:
        """Device time of verifying 64 tokens (16 requests, chains of 3) and of 64 plainly decoded ones."""
        costs, seen = {}, {}
        rows = 64 if max(self.plan.batches) >= 64 else 4 * max(1, max(self.plan.batches) // 4)
        for policy, batch in (("chain-3", rows // 4), (NONE, rows)):
            server.set_policy(policy)
            ask = partial(answers.generate, server.url, self._prompts[:batch], self.plan.tokens)
            costs[policy], seen[policy] = target_ms(server, ask, rows)
        self.found.details["verification"] = {
            "tokens": rows, "verify_ms": costs["chain-3"], "decode_ms": costs[NONE],
            "ratio": costs["chain-3"] / costs[NONE] if costs[NONE] else None, "iterations": seen,
        }  # fmt: skip

    def _profiles(self, server: ServerProcess) -> None:
        """At batch 1 and 32, or the largest that is measured."""
        server.set_policy(SPECULATING[0])
        largest = max(self.plan.batches)
        for batch in sorted({1, min(32, largest)}):
            prompts = self._prompts[:batch]
            folder = self.out / "profiles" / f"batch-{batch}"
            self.found.profiles[str(batch)] = profile(
                server, folder, prompts, self.plan.tokens, self.pair.device
            )

    def _mixed(self, server: ServerProcess, name: str, policy: str | None = None) -> None:
        if policy is not None:
            server.set_policy(policy)
        if f"{PLAIN}:speed" not in self.found.done:
            raise StageError(f"loads and SLOs follow from all of {PLAIN}:speed: run it first")
        plain = self.found.tpot_ms[PLAIN]
        idlest, busiest = min(plain), max(plain)
        capacity_tps = busiest / plain[busiest] * 1e3
        for load in sorted(self.plan.loads, reverse=True):  # the one that is judged first
            if name in self.found.mixed.get(f"{load:g}", {}):
                continue
            folder = self.out / f"mixed-{load:g}" / name
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
            summary = run_mixed(
                server, folder, capacity_tps * load, self.plan.mixed_s,
                plain[idlest], self.plan.seed, self.console,
            )  # fmt: skip
            server.drain()  # before it counts: what a server that has died did not answer is no result
            self.found.mixed.setdefault(f"{load:g}", {})[name] = summary
            self._save()

    def _identity(self) -> dict[str, Any]:
        """What results must have in common to belong to one report; JSON values."""
        pair = asdict(replace(self.pair, target=_name(self.pair.target), draft=_name(self.pair.draft)))
        pair["config"] = AdaServeConfig().model_dump()
        values = {
            "schema_version": SCHEMA_VERSION, "gpu": gpu(), "packages": packages(), "pair": pair,
            "plan": asdict(self.plan),
        }  # fmt: skip
        return dict(json.loads(json.dumps(values)))

    def _keep(self) -> dict[str, Any]:
        """Writes what another run needs to continue; returns what was found, as JSON values."""
        found = asdict(self.found)
        write_json(self.out / STATE_FILE, {"identity": self._identity(), "found": found})
        return found

    def _save(self) -> dict[str, Any]:
        """Writes the report so far, and what another run needs to continue; returns the report."""
        if self._running is not None:
            self._note_code(self._running)
        dry = self.pair.device == "cpu"
        lacks_graphs = NOT_SHOWN_WITHOUT_GRAPHS if "--disable-cuda-graph" in self.pair.flags else ()
        found = self._keep()
        report = {
            "kind": "gpu-check",
            "dry_run": dry,
            "does_not_show": list(NOT_SHOWN_ON_CPU if dry else lacks_graphs),
            "made": provenance(),
            "other_code": [stage for stage, codes in self.found.code.items() if codes != [self._code]],
            **self._identity(),
            **{k: v for k, v in found.items() if k != "reference"},
            "targets": targets(self.found, self.plan, dry),
        }
        write_json(self.out / "gpu-check.json", report)
        return report


def _reason(error: Exception) -> str:
    """What a server's error says of why it ended; of another one, what it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ServerError):
        said = [line for line in lines if not line.startswith("(full log")]
        return "; ".join(said[1:] or said)[-MAX_SAID:]
    if isinstance(error, UserError) and lines[1:]:  # then what a process printed before it ended
        lines[0] += f" {'; '.join(lines[1:])[-MAX_SAID:]}"
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def _times(server: ServerProcess, name: str) -> dict[str, float] | None:
    return None if name == PLAIN or name in OWN else server.report()["times"]


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {k: after[k] - before[k] for k in after}


def _prompts(model: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of held-out code and prose of 30 to 300 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer.encode(t)) for t in held_out(seed)[:count]]


def _name(path: str) -> str:
    return Path(path).name if Path(path).is_dir() else path

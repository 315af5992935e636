"""``adaserve simulate run``: every trace x load x policy x seed, and what is written about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml
from pydantic import create_model
from rich.console import Console

from adaserve.bench.display import progress
from adaserve.bench.simulate.cases import COMMAND, Case, Setting, markdown, plot_violations, run_grid
from adaserve.bench.simulate.hardware import Hardware
from adaserve.bench.simulate.traces import DRAWN, rate_rps, read_workload
from adaserve.checked import Checked
from adaserve.config import AdaServeConfig
from adaserve.host.files import write_json
from adaserve.loadgen.results import command_line
from adaserve.scheduler.admission.situation import Order, PrefillConfig
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.policies import build_policy, chain_length
from adaserve.scheduler.simulator.clairvoyant import CLAIRVOYANT
from adaserve.scheduler.simulator.order import ROW_ORDERS
from adaserve.scheduler.simulator.recorded import RECORDED_TEXT, load_children
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig
from adaserve.scheduler.simulator.trees import ChildSource, SyntheticChildren
from adaserve.scheduler.simulator.workload import TextModel
from adaserve.slo.classes import SLOConfig

PrefillMode = Literal["fixed", "mixed", "slack", "exclusive"]
"""How prompts are read: as servers do (``config.PREFILLS``), or in chunks of a fixed size that share forwards
with verification, as in the artifact of the paper's authors."""
SHARED: tuple[PrefillMode, ...] = ("fixed", "mixed")
PACED: tuple[PrefillMode, ...] = ("mixed", "slack")
CHUNK_TOKENS = {True: 512, False: 4096}
"""The largest chunk, unless one is given, by whether it shares a forward."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The options of ``adaserve simulate run``, by their names there."""

    trace: list[str]
    policy: list[str]
    model: str
    gpu: str
    tp: int
    profile: Path | None
    kv_tokens: int | None
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    baseline_ms: float | None
    slo_config: Path | None
    prefill: PrefillMode
    chunk: int | None
    order: Order | None  # None = that of the mode
    gate: float | None  # None = that of the mode; 0 = none
    shed: bool
    lag: bool
    replicas: int
    router: str
    miscalibration: float | None
    eos_share: float
    recorded: Path | None

    def prepared(self) -> tuple[list[Case], Setting]:
        """The cases, and what they share. Raises ValueError if the options make no sense, OSError."""
        if min(self.loads) <= 0:
            raise ValueError("--loads must be numbers above 0")
        names = (_parts(spec)[0] for spec in self.policy)
        _all_differ("policies", names, "give one a name, as in NAME=priced:KEY=VALUE")
        _all_differ("traces", map(_workload, self.trace), "rename one of them")
        shared = self._simulation()
        cases, setting = list(self._cases(shared)), self._setting(shared.replica.latency)
        for name in {row.slo_class for case in cases for row in case.trace.rows if row.slo_class is not None}:
            setting.slos.get(name)
        return cases, setting

    def write(self, out: Path) -> None:
        """The options, and the command that gave them."""
        out.mkdir(parents=True, exist_ok=True)
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        (out / COMMAND).write_text(command_line() + "\n", encoding="utf-8")
        (out / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    def _simulation(self) -> SimulationConfig:
        """What all cases share; the policy is that of each."""
        hardware = Hardware(self.model, self.gpu, self.tp, self.profile)
        replica = ReplicaConfig(
            hardware.latency(),
            self.kv_tokens or hardware.kv_tokens(),
            mixed=self.prefill in SHARED,
            prefill=self._prefills(),
            shed=self.shed,
            lag=self.lag,
        )
        return SimulationConfig(
            replica, "none", replicas=self.replicas, router=self.router, children=self._children()
        )

    def _prefills(self) -> PrefillConfig:
        """The rule of the mode, changed by what is given."""
        chunk_tokens = self.chunk or CHUNK_TOKENS[self.prefill in SHARED]
        rule = AdaServeConfig().for_prefills if self.prefill in PACED else PrefillConfig
        prefills = rule(chunk_tokens=chunk_tokens)
        if self.gate is not None:
            prefills = replace(prefills, gate=self.gate or None)
        if self.order is not None:
            lost_every_s = prefills.lost_every_s if self.order == "deadline" else None
            prefills = replace(prefills, order=self.order, lost_every_s=lost_every_s)
        return prefills

    def _children(self) -> ChildSource:
        """Where the candidates come from."""
        if self.miscalibration is None:
            return load_children(self.recorded) if self.recorded else SyntheticChildren()
        if self.recorded:
            raise ValueError("a recording has errors of its own: leave --miscalibration or --recorded out")
        return SyntheticChildren(self.miscalibration)

    def _setting(self, latency: LatencyModel) -> Setting:
        slos = SLOConfig.load(self.slo_config) if self.slo_config else SLOConfig()
        baseline_ms = self.baseline_ms or latency.baseline_s() * 1e3
        text = RECORDED_TEXT if self.recorded else TextModel()
        return Setting(slos, replace(text, eos_share=self.eos_share), baseline_ms / 1e3)

    def _cases(self, shared: SimulationConfig) -> Iterator[Case]:
        for name in self.trace:
            label = _workload(name)
            for load in self.loads:
                for seed in self.seeds:
                    trace = read_workload(name, seed)
                    rps = load * rate_rps(name, trace)
                    for spec in self.policy:
                        tag, config = _with_policy(shared, spec)
                        yield Case(label, rps, tag, seed, config, trace.scaled(1 / load))


def _all_differ(what: str, labels: Iterable[str], remedy: str) -> None:
    """Raises ValueError if two labels are equal: their figures would be averaged as if they were seeds."""
    for label, times in Counter(labels).items():
        if times > 1:
            raise ValueError(f"{times} {what} are called {label!r}: {remedy}")


def _workload(trace: str) -> str:
    """What a trace is called."""
    return trace if trace.startswith(DRAWN) else Path(trace).stem


def _parts(spec: str) -> tuple[str, str, str]:
    """Label, name and settings of ``name`` or ``label=name:key=value,...``."""
    head, _, settings = spec.partition(":")
    label, _, name = head.partition("=")
    return label, name or label, settings


def _with_policy(shared: SimulationConfig, spec: str) -> tuple[str, SimulationConfig]:
    """The label of ``spec``, and the simulation with its policy."""
    label, name, settings = _parts(spec)
    simulated = (*ROW_ORDERS, *CLAIRVOYANT)
    if name not in simulated:
        try:
            build_policy(name)
        except ValueError as error:  # which names those of servers
            raise ValueError(f"{error}, {', '.join(simulated)}") from error
    config = _policy_config(settings, shared.replica.latency)
    # Unless a setting cuts it, a chain has its whole length: a shorter one would not be what it is called.
    if "d_max=" not in settings:
        config = replace(config, d_max=max(config.d_max, chain_length(name) or 0))
    return label, replace(shared, policy=name, policy_config=config)


def _policy_config(text: str, latency: LatencyModel) -> PolicyConfig:
    """``key=value,key=value`` over the defaults; values are YAML. Raises ValueError naming the keys."""
    try:
        given = yaml.safe_load("{" + text.replace("=", ": ") + "}")
    except yaml.YAMLError:
        raise ValueError(f"policy settings {text!r} are not KEY=VALUE,... with YAML values") from None
    values = {str(key): tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    return PolicyConfig(latency=latency, **dict(_policy_settings()(**values)))


@cache
def _policy_settings() -> type[Checked]:
    """Checks a policy's settings; the costs of forwards are not among them, since the hardware decides
    those."""
    hints = get_type_hints(PolicyConfig)
    settable = {f.name: (hints[f.name], f.default) for f in fields(PolicyConfig)}
    del settable["latency"], settable["costs"]
    return create_model("PolicySettings", __base__=Checked, **settable)  # type: ignore[call-overload, no-any-return]


def run_and_report(
    cases: list[Case], setting: Setting, out: Path | None, records: bool, console: Console
) -> None:
    """Prints a table; with ``out``, writes rows, records of requests and figures there. Raises SLOError."""
    with progress(console) as bar:
        task = bar.add_task("simulating", total=sum(len(case.trace) for case in cases))

        def show(arrived: int, case: Case) -> None:
            what = f"{case.workload} {case.load:.2f} rps {case.policy}"
            bar.update(task, completed=arrived, description=what)

        rows = run_grid(cases, setting, out, show, records)
        bar.update(task, completed=bar.tasks[task].total)
    text = markdown(rows)
    if out:
        (out / "table.md").write_text(text + "\n", encoding="utf-8")
        summaries = [{k: r[k] for k in ("workload", "load_rps")} | r["summary"] for r in rows]
        write_json(out / "summary.json", summaries)
        plot_violations(rows, out / "violations.png")
    print(text)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value

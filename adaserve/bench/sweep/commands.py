"""What ``adaserve bench sweep`` does with its options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.display import progress
from adaserve.bench.sweep.aggregate import Results
from adaserve.bench.sweep.eta import Eta
from adaserve.bench.sweep.plan import QUICK_POLICIES, SweepError, SweepPlan
from adaserve.bench.sweep.report import write_all
from adaserve.bench.sweep.requests import load_workload
from adaserve.bench.sweep.runner import ATTEMPTS, Sweep
from adaserve.bench.sweep.simulated import Simulator, markdown, to_json
from adaserve.bench.sweep.store import Store, changed, merged
from adaserve.bench.sweep.systems import family, length_of, system, with_length
from adaserve.config import AdaServeConfig
from adaserve.host.files import write_json
from adaserve.loadgen.results import new_results_dir
from adaserve.server import ServerSpec, require_models
from adaserve.terminal import say

SET_UP_S, COMPARED_S = 210.0, 270.0
"""First guesses: until the first block, and of `none` with SGLang on two idle servers."""


@dataclass(frozen=True)
class Options:
    """The command line, parsed; None = not given."""

    given: Mapping[str, Any]  # fields of SweepPlan
    quick: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)  # model, draft, size, extra: SGLang's own flags
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of AdaServeConfig
    baseline_ms: float | None = None
    capacity_rps: float | None = None
    minutes: float | None = None
    attempts: int = ATTEMPTS
    out: Path | None = None
    readme: Path | None = None


def plan_of(options: Options, store: Store) -> SweepPlan:
    """The plan that flags and folder give. Raises SweepError."""
    given = {k: v for k, v in options.given.items() if v is not None}
    plan = SweepPlan.from_json(store.head()["plan"]) if store.exists else SweepPlan()
    if given.get("traces"):
        given.setdefault("axes", (*plan.axes, "traces"))
    if store.exists:
        return merged(plan, given)
    given = {k: tuple(dict.fromkeys(v)) if isinstance(v, tuple) else v for k, v in given.items()}
    if options.quick:
        plan = replace(
            plan,
            policies=QUICK_POLICIES,
            side_policies=QUICK_POLICIES,
            loads=(0.6,),
            seeds=(0,),
            seconds=12.0,
        )
    if "policies" in given:
        given.setdefault("side_policies", given["policies"])
    if "loads" in given and plan.at not in given["loads"]:
        # The other axes share a point with the load axis, unless asked otherwise.
        given.setdefault("at", sorted(given["loads"])[len(given["loads"]) // 2])
    return replace(plan, **given)


def trace_files(folder: Path) -> tuple[str, ...]:
    """The traces in a folder, in order of their names. Raises SweepError if there are none."""
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    found = tuple(
        str(p)
        for p in files
        if p.is_file() and not p.name.startswith(".") and p.suffix.lower() not in (".md", ".rst", ".txt")
    )
    if not found:
        raise SweepError(f"{folder} holds no traces: put some there (docs/load-testing.md says which)")
    return found


def server_settings(options: Options, store: Store) -> dict[str, dict[str, Any]]:
    """What the server is started with: the flags, or those that the folder was started with. Raises
    SweepError for others."""
    every = {"server": options.server, "config": options.config}
    given = {part: {k: v for k, v in flags.items() if v is not None} for part, flags in every.items()}
    if not store.exists:
        return given
    stored: dict[str, dict[str, Any]] = store.head()["server_settings"]
    for part, flags in given.items():
        for name, value in json.loads(json.dumps(flags)).items():
            if value != stored[part].get(name):
                was = f"with {stored[part][name]}" if name in stored[part] else "without it"
                raise SweepError(changed(name, was))
    return stored


def server_of(settings: Mapping[str, Mapping[str, Any]], plan: SweepPlan) -> ServerSpec:
    """The server, with trees as deep as the longest chain among the systems. Raises ConfigError also for an
    unknown policy, ServerError."""
    names = (*plan.policies, *plan.side_policies)
    for name in names:
        system(name if family(name) is None else with_length(name, plan.lengths[0]))
    config = AdaServeConfig(**settings["config"], slo_config=plan.slo_config)
    lengths = [k for name in names if (k := length_of(name)) is not None]
    lengths += plan.lengths if any(map(family, names)) else ()
    config = config.changed(max_depth=max(config.max_depth, *lengths, 1))
    server = {**settings["server"], "extra": tuple(settings["server"].get("extra", ()))}
    return ServerSpec(config=config, **server)


def _prepared(options: Options) -> tuple[Store, SweepPlan, dict[str, dict[str, Any]], ServerSpec]:
    """Folder, plan, and the server's flags and specification. If they make no sense, raises SweepError,
    SLOError, TraceError, ConfigError or ServerError before anything starts."""
    store = Store(options.out or new_results_dir(Path("results"), "sweep"))
    store.refuse_other()
    plan, settings = plan_of(options, store), server_settings(options, store)
    for axis in plan.axes:
        for _, point in plan.points(axis):
            load_workload(plan, point)
    return store, plan, settings, server_of(settings, plan)


def sweep(options: Options, console: Console) -> bool:
    """Runs, then draws; False when cases are left. Raises what ``Sweep.run`` raises."""
    store, plan, settings, spec = _prepared(options)
    folder = store.folder
    require_models(spec)
    spec.models()  # widened now: that has a progress bar of its own
    work = Sweep(
        store,
        plan,
        spec,
        console,
        settings,
        options.baseline_ms,
        options.capacity_rps,
        options.minutes,
        options.attempts,
    )
    every = plan.blocks_in_order()
    left = len({c.id for c in every} - set(store.finished()))
    say(
        console,
        f"{left} of {len(every)} blocks to run (all take about {minutes_of(plan):.0f} minutes); "
        f"results: {folder}",
    )
    done = False
    try:
        done = work.run()
    except KeyboardInterrupt:
        console.print("interrupted; what is finished is kept")
        raise
    finally:
        if store.exists and store.finished():
            _try_to_redraw(folder, options.readme, console)
        if not done and store.exists:
            say(console, f"continue: adaserve bench sweep --out {shlex.quote(str(folder))}")
    return done


def _try_to_redraw(folder: Path, readme: Path | None, console: Console) -> None:
    """Draws; an error here must hide neither the results nor what ended the sweep."""
    try:
        redraw(folder, readme, console)
    except Exception as error:
        say(
            console,
            f"the results are kept, but could not be drawn: {error}; try again with "
            f"adaserve bench sweep --plot-only {shlex.quote(str(folder))}",
        )


def minutes_of(plan: SweepPlan) -> float:
    """A first guess of how long a sweep takes."""
    cases_s = len(plan.blocks_in_order()) * Eta(plan.seconds).case_s
    return (SET_UP_S + (COMPARED_S if plan.check_points else 0.0) + cases_s) / 60


def redraw(folder: Path, readme: Path | None, console: Console) -> None:
    """Figures, tables and ``README.md`` of a folder from its records. Raises SweepError."""
    written = write_all(Store(folder), readme, Console())
    say(console, f"written: {', '.join(written)} in {folder}")


def replay(folder: Path, console: Console) -> None:
    """The simulator on a folder's blocks: prints the comparison, and writes it there. Raises SweepError."""
    simulator = Simulator(Results(Store(folder)))
    with progress(console) as bar:
        task = bar.add_task("replaying", total=simulator.steps)
        found = simulator.agreements(lambda what: bar.update(task, advance=1, description=what))
    text = f"# The simulator on the same requests\n\n{simulator.acceptance}\n\n{markdown(found)}\n"
    (folder / "simulated.md").write_text(text, encoding="utf-8")
    write_json(folder / "simulated.json", to_json(found))
    print(text)


def show_plan(options: Options) -> None:
    """Prints the blocks. Raises what `_prepared` raises."""
    _, plan, _, _ = _prepared(options)
    for case in (every := plan.blocks_in_order()):
        print(case.id)
    print(f"{len(every)} blocks, about {minutes_of(plan):.0f} minutes")

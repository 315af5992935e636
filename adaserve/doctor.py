"""``adaserve doctor``: what this host has, what is missing, and what to do about it.

Every check is a function that returns findings and changes nothing, so that each can be tested alone.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adaserve.commands import NO, in_one_line
from adaserve.host import device
from adaserve.host.cache import cache_folder
from adaserve.host.cores import usable_cores, usable_memory
from adaserve.host.description import cpu_name, version_of
from adaserve.host.ports import why_not_free
from adaserve.sglang_compat import SGLANG_VERSION

State = Literal["ok", "note", "missing"]

INSTALL = "install AdaServe again: pip install . in its folder"
NEEDED_MEMORY_GIB = 8.0
NEEDED_DISK_GB = 2.0
NEEDED_OPEN_FILES = 4096
USED_FOLDERS = ("kernels", "learned", "pair", "profiles")
"""What servers write to, in the cache."""
_PIPE_WIDTH = 1000  # where nobody sees where lines end, a path must not be cut in two
CPU_FEATURES = {
    "avx2": "AVX2",
    "f16c": "F16C",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "bf16": "BF16",
}
"""Instruction sets as /proc/cpuinfo spells them, and as people spell them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Only ``missing`` keeps AdaServe from serving."""

    check: str
    state: State
    found: str
    remedy: str = ""


def check_python(now: tuple[int, int] = sys.version_info[:2]) -> list[Finding]:
    found = f"{now[0]}.{now[1]} at {sys.executable}"
    if now > (3, 12):
        return [Finding("Python", "note", found, "3.11 and 3.12 were tested")]
    return [Finding("Python", "ok", found)]


def check_disk(folder: Path | None = None) -> list[Finding]:
    cache = folder or cache_folder()
    # `Path.exists` raises where a folder above may not be entered.
    existing = next(p for p in (cache, *cache.absolute().parents) if os.path.exists(p))
    used = [existing, *(cache / name for name in USED_FOLDERS if os.path.exists(cache / name))]
    for place in used:
        if not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
            # What is there is used. The widened pair alone is not done without.
            has_pair = existing == cache and any(cache.glob("pair/target-*/config.json"))
            state: State = "note" if has_pair else "missing"
            remedy = "let this user write there, or set XDG_CACHE_HOME elsewhere"
            return [Finding("Disk", state, f"{place} cannot be written to", remedy)]
    free_gb = shutil.disk_usage(existing).free / 1e9
    found = f"{free_gb:.1f} GB free for {cache}"
    if free_gb < NEEDED_DISK_GB:
        return [
            Finding(
                "Disk", "missing", found, f"free {NEEDED_DISK_GB:.0f} GB, or set XDG_CACHE_HOME elsewhere"
            )
        ]
    return [Finding("Disk", "ok", found)]


def check_memory(total_bytes: int | None = None) -> list[Finding]:
    gib = (usable_memory() if total_bytes is None else total_bytes) / 2**30
    if gib < NEEDED_MEMORY_GIB:
        remedy = f"{NEEDED_MEMORY_GIB:.0f} GiB are needed for the embedded pair; try a smaller --size"
        return [Finding("Memory", "note", f"{gib:.1f} GiB", remedy)]
    return [Finding("Memory", "ok", f"{gib:.1f} GiB")]


def check_open_files(most: int | None = None) -> list[Finding]:
    """SGLang raises the soft limit as far as the hard one lets it. Beyond that connections are reset, and no
    log says why."""
    if most is None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY:
        return [Finding("Open files", "ok", "no limit")]
    if most < NEEDED_OPEN_FILES:
        remedy = "each connection takes one: raise the hard limit (ulimit -Hn, LimitNOFILE)"
        return [Finding("Open files", "note", f"at most {most}", remedy)]
    return [Finding("Open files", "ok", f"at most {most}")]


def check_cpu(cpuinfo: str | None = None) -> list[Finding]:
    """Cores, and the instruction sets that decide how fast a CPU host serves."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    flags = cpu_flags(cpuinfo)
    names = [name for flag, name in CPU_FEATURES.items() if flag in flags]
    cores = f"{usable_cores()} cores"
    found = f"{cores}; {', '.join(names) or 'no known vector instructions'}"
    if not names:
        return [Finding("CPU", "note", found, "serving works, slowly")]
    return [Finding("CPU", "ok", found)]


def cpu_flags(cpuinfo: str) -> set[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def check_accelerator() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        return [Finding("Accelerator", "ok", torch.cuda.get_device_name())]
    if device.on_cpu():
        return [
            Finding(
                "Accelerator",
                "note",
                "none; AdaServe's CPU platform is used",
                "a GPU is not needed for the demo",
            )
        ]
    return [Finding("Accelerator", "note", "no CUDA device, and AdaServe's CPU platform is not used")]


def check_sglang(installed: str | None = None) -> list[Finding]:
    remedy = f"pip install sglang=={SGLANG_VERSION}"
    found = installed or version_of("sglang")
    if found is None:
        return [Finding("SGLang", "missing", "not installed", remedy)]
    if found != SGLANG_VERSION:
        return [Finding("SGLang", "missing", found, f"AdaServe hooks into {SGLANG_VERSION}: {remedy}")]
    return [Finding("SGLang", "ok", found)]


def check_entry_points(on_cpu: bool | None = None) -> list[Finding]:
    """SGLang finds AdaServe by entry points, and three environment variables can hide them."""
    findings, names = [], []
    for what, group in (("Plugin", "sglang.srt.plugins"), ("CPU platform", "sglang.srt.platforms")):
        ours = [e for e in entry_points(group=group) if e.value.startswith("adaserve.")]
        if not ours:
            findings.append(Finding(what, "missing", f"no entry point in {group}", INSTALL))
            continue
        findings.append(Finding(what, "ok", f"{ours[0].name} = {ours[0].value}"))
        names.append(ours[0].name)
    return findings + _hidden(names, device.on_cpu() if on_cpu is None else on_cpu)


def _hidden(names: list[str], on_cpu: bool) -> list[Finding]:
    """What the environment hides of our entry points: the plugin's name, and the CPU platform's behind it."""
    findings = []
    allowed, chosen = os.environ.get("SGLANG_PLUGINS"), os.environ.get("SGLANG_PLATFORM")
    listed = {name.strip() for name in (allowed or "").split(",")}  # platforms, too
    left_out = [name for name in (names if on_cpu else names[:1]) if name not in listed]
    if allowed and left_out:
        remedy = f"add {','.join(left_out)} to it, or unset it"
        findings.append(Finding("Plugin", "missing", f"SGLANG_PLUGINS={allowed}", remedy))
    if chosen and not (on_cpu and chosen in names[1:]):  # then SGLang leaves out the plugin as well
        remedy = f"set it to {names[-1]}, or unset it" if on_cpu and names else "unset it"
        findings.append(Finding("Plugin", "missing", f"SGLANG_PLATFORM={chosen}", remedy))
    if _asks_for_cpu_engine():
        found = "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own, even beside a GPU"
        findings.append(Finding("CPU platform", "missing", found, "unset it"))
    return findings


def _asks_for_cpu_engine() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def check_settings() -> list[Finding]:
    """What the environment sets for all servers, if anything."""
    from adaserve.config import ENV, AdaServeConfig, ConfigError

    if ENV not in os.environ:
        return []
    try:
        AdaServeConfig.load()
    except ConfigError as error:
        return [Finding("Settings", "missing", str(error), f"correct {ENV}, or unset it")]
    return [Finding("Settings", "ok", ENV)]


def check_engine() -> list[Finding]:
    """What a server loads. Where the environment names a platform that is not there, SGLang does not load,
    and that is said already."""
    chosen = os.environ.get("SGLANG_PLATFORM")
    if _asks_for_cpu_engine() or (chosen and chosen not in entry_points(group="sglang.srt.platforms").names):
        return []
    found = _hooks()
    return [*found, *_compiler()] if healthy(found) else found


def _hooks() -> list[Finding]:
    """Registers all hooks, as a server does."""
    try:
        import sglang.srt.managers.scheduler  # noqa: F401  (what it lacks is no fault of the first hook)

        from adaserve import patches

        if not patches.targets:
            patches.apply_all()
    except OSError:  # this host's fault: SGLang makes folders when it is imported
        raise
    except Exception as error:  # whatever it is, a server would fail the same way
        return [Finding("Hooks", "missing", str(error), f"pip install sglang=={SGLANG_VERSION}")]
    return [Finding("Hooks", "ok", f"{len(set(patches.targets))} places in SGLang")]


def _compiler() -> list[Finding]:
    from adaserve.engine.cpu.build import BuildError, find_compiler

    try:
        return [Finding("Compiler", "ok", find_compiler())]
    except BuildError as error:
        cost = "the CPU kernels stay off and serving is slower"
        if not device.on_cpu():
            cost = "FlashInfer cannot build its kernels"
        return [Finding("Compiler", "note", "none", f"{cost}: {error}")]


def check_cuda_toolkit(on_gpu: bool | None = None) -> list[Finding]:
    """Where FlashInfer looks for nvcc: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda. A CPU host needs none."""
    import torch

    if not (torch.cuda.is_available() if on_gpu is None else on_gpu):
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        home = str(Path(found).parent.parent) if (found := shutil.which("nvcc")) else "/usr/local/cuda"
    nvcc = Path(home) / "bin" / "nvcc"
    if nvcc.exists():
        return [Finding("CUDA toolkit", "ok", str(nvcc))]
    cost = "SGLang's and FlashInfer's kernels are compiled at the first start"
    remedy = f"{cost}: install the CUDA toolkit {torch.version.cuda or ''}, and set CUDA_HOME to its folder"
    return [Finding("CUDA toolkit", "note", f"no {nvcc}", remedy)]


def check_pair() -> list[Finding]:
    from adaserve.pair import folders

    try:
        weights = folders.weights_folder()
    except folders.PairError as error:
        remedy = f"{error}; models of your own need --model-path and --draft-model-path only"
        return [Finding("Embedded pair", "note", "no weights", remedy)]
    widened = [p for p in folders.cache_folder().glob("target-*") if (p / "config.json").exists()]
    if not widened:
        return [
            Finding(
                "Embedded pair", "note", str(weights), "its target is widened at the first start (seconds)"
            )
        ]
    return [
        Finding("Embedded pair", "ok", f"{weights}; widened: {', '.join(sorted(p.name for p in widened))}")
    ]


def check_profile(folder: Path | None = None) -> list[Finding]:
    """Profiles kept by `adaserve profile`, and whether they were measured with these versions."""
    files = sorted((folder or cache_folder() / "profiles").glob("*.json"))
    if not files:
        return [Finding("Profile", "note", "none; a server measures briefly at start", "adaserve profile")]
    good = [f.name for f in files if profile_matches(f)]
    if not good:
        return [Finding("Profile", "note", f"{len(files)}, of other hosts or versions", "adaserve profile")]
    return [Finding("Profile", "ok", ", ".join(good))]


def profile_matches(path: Path) -> bool:
    """Whether a profile can be read and names this processor and these versions."""
    import sglang
    import torch

    from adaserve.scheduler.costs.latency import ProfileError
    from adaserve.scheduler.costs.profile import load_profile

    try:
        meta = load_profile(path).meta
    except ProfileError:
        return False
    # As profiles name them: the package of torch 2.14.1+cu130 is called 2.14.1.
    versions = {"torch": str(torch.__version__), "sglang": sglang.__version__}
    return versions.items() <= meta.items() and cpu_name() in str(meta.get("host", ""))


def check_port(port: int = 30000) -> list[Finding]:
    if why_not_free("127.0.0.1", port) is not None:
        return [Finding("Port", "note", f"{port} is in use", "adaserve serve --port ANOTHER")]
    return [Finding("Port", "ok", f"{port} is free")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_disk,
    check_memory,
    check_open_files,
    check_cpu,
    check_accelerator,
    check_sglang,
    check_entry_points,
    check_settings,
    check_engine,
    check_cuda_toolkit,
    check_pair,
    check_profile,
    check_port,
)


def examine(checks: Sequence[Callable[[], list[Finding]]] = CHECKS) -> list[Finding]:
    """All findings. A check that fails is a finding too; the others still report."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # finding a broken installation is its purpose
            name = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
            why = in_one_line(error)
            found, remedy = (f"{type(error).__name__}: {error}", INSTALL) if why is None else (why, "")
            findings.append(Finding(name, "missing", found, remedy))
    return findings


def healthy(findings: Sequence[Finding]) -> bool:
    return all(f.state != "missing" for f in findings)


def show(findings: Sequence[Finding], console: Console) -> None:
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    table = Table(title="AdaServe on this host", title_justify="left")
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(marks[f.state], f.check, escape(f.found), escape(f.remedy))
    console.print(table)
    console.print("Ready: adaserve demo" if healthy(findings) else "Not ready: see the lines marked missing.")


def doctor(json_output: bool = False) -> int:
    """Examines this host and prints the report. The exit code: 0 = ready, 3 = something is missing."""
    with Console(stderr=True).status("loading SGLang"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, about hardware that is not here
        findings = examine()
    if json_output:
        print(json.dumps({"ok": healthy(findings), "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        show(findings, Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH))
    return 0 if healthy(findings) else NO

"""The script of a first half hour: its stages as they are written down, and those that start no server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_stages.sh"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder with the script alone: what it writes must not lie in the working tree."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "out").mkdir()
    return tmp_path


def run(host: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "OUT": str(host / "out"),
        **settings,
    }
    command = ["bash", str(host / "scripts" / SCRIPT.name), *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_help_lists_every_stage(host: Path) -> None:
    text = run(host, "help").stdout
    listed = re.findall(r"^  ([a-z]+)  +", text, re.MULTILINE)
    known = re.search(r"^  (assemble \|.*)\) ", SCRIPT.read_text(), re.MULTILINE)
    assert known is not None and listed == known.group(1).split(" | ")
    unknown = run(host, "speed")
    assert unknown.returncode and "scripts/gpu_stages.sh STAGE" in unknown.stdout


def test_the_first_stages_on_a_cpu(host: Path) -> None:
    """Each saves what it found and names the next one."""
    for stage, following in (("assemble", "facts"), ("facts", "kernels"), ("kernels", "smoke")):
        done = run(host, stage, "--device", "cpu")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(rf"[Nn]ext: {following}", done.stdout)
    facts, kernels = (json.loads((host / "out" / f"{n}.json").read_text()) for n in ("facts", "kernels"))
    assert facts["packages"]["sglang"] and facts["disk_write_mb_per_s"] > 0
    assert all(kernels[name]["right"] and kernels[name]["cases"] for name in ("triton", "noise", "moves"))


def test_a_kernel_that_fails_changes_the_rest(host: Path) -> None:
    """The choice is written down for the stages that follow, unless the environment says otherwise."""
    fake = host / "python"
    fake.write_text('#!/bin/sh\ncase "$*" in *kernels*) exit 3;; *) echo "$*";; esac\n')
    fake.chmod(0o755)
    done = run(host, "kernels", PYTHON=str(fake), PAIR="small")
    assert done.returncode == 0 and "Triton" in done.stdout
    later = run(host, "profile", PYTHON=str(fake), PAIR="small").stdout
    assert "--attention-backend triton" in later and "--adaserve-attention triton" in later
    assert "--only adaserve:profile" in later
    chosen = run(host, "profile", PYTHON=str(fake), PAIR="small", ATTENTION="flashinfer").stdout
    assert "--attention-backend flashinfer" in chosen


@pytest.mark.parametrize("stage", ["smoke", "plain", "adaserve", "standalone", "profile", "mixed"])
@pytest.mark.parametrize("status", [1, 2])
def test_a_stage_that_failed_does_not_send_on(host: Path, stage: str, status: int) -> None:
    """Neither after a check that says so nor after one that crashed; a missed target is no failure."""
    fake = host / "python"
    fake.write_text(f"#!/bin/sh\nexit {status}\n")
    fake.chmod(0o755)
    failed = run(host, stage, PYTHON=str(fake), PAIR="small")
    assert failed.returncode == 2 and "is not done" in failed.stdout
    assert not re.search(r"[Nn]ext: |have run", failed.stdout)
    fake.write_text("#!/bin/sh\nexit 3\n")
    missed = run(host, stage, PYTHON=str(fake), PAIR="small")
    assert (
        missed.returncode == 0 and re.search(r"[Nn]ext|therwise|have run", missed.stdout)
    ) or stage == "smoke"


def test_stages_name_sections_of_the_check(tmp_path: Path) -> None:
    from rich.console import Console

    from adaserve.bench.gpu_check.check import Check
    from adaserve.bench.gpu_check.findings import CheckPlan
    from adaserve.bench.gpu_check.servers import OWN, Pair

    named = re.findall(r"\b((?:sglang|adaserve)[a-z0-9-]*:[a-z0-9-]+)\b", SCRIPT.read_text())
    assert len(named) >= 8
    Check(Pair("t", "d", "cuda"), CheckPlan(), tmp_path, Console(quiet=True), only=named)
    assert all(kind in SCRIPT.read_text() for kind in OWN)

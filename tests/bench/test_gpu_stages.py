"""The script of a first half hour: its stages as they are written down, and those that start no server."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
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


def saved(host: Path, *names: str) -> list[str]:
    """Files of the archive that a stage leaves to be fetched."""
    with tarfile.open(host / "out" / "gpu-stages.tar.gz") as archive:
        files = [archive.extractfile(f"./{name}") for name in names]
        return [file.read().decode() for file in files if file is not None]


def fake_python(host: Path, script: str) -> str:
    """An interpreter that does what a shell does with ``script``."""
    fake = host / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    return str(fake)


def test_help_lists_every_stage(host: Path) -> None:
    text = run(host, "help").stdout
    listed = re.findall(r"^  ([a-z]+)  +", text, re.MULTILINE)
    known = re.search(r"^    (assemble \|.*)\) ", SCRIPT.read_text(), re.MULTILINE)
    assert known is not None and listed == known.group(1).split(" | ")
    unknown = run(host, "speed")
    assert unknown.returncode and "scripts/gpu_stages.sh STAGE" in unknown.stdout
    assert (
        run(host, "facts", "speed").returncode
        and not (host / ".local" / "gpu-stages" / "facts.json").exists()
    )


@pytest.mark.slow
def test_the_first_stages_on_a_cpu(host: Path) -> None:
    """Each saves what it found and names the next one, alone or with others in one call."""
    for stages, following in ((("assemble", "facts"), ("facts", "kernels")), (("kernels",), ("smoke",))):
        done = run(host, *stages, "--device", "cpu")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.findall(r"[Nn]ext: (\w+)", done.stdout) == list(following)
    facts, kernels = map(json.loads, saved(host, "facts.json", "kernels.json"))
    assert facts["packages"]["sglang"] and facts["disk_free_gb"] > 0
    assert all(
        kernels[name]["right"] and kernels[name]["cases"]
        for name in ("triton", "layout", "noise", "moves", "beams", "filters")
    )


def test_a_kernel_that_fails_changes_the_rest(host: Path) -> None:
    """The choice is written down for the stages that follow, unless the environment says otherwise."""
    fails = 'case "$*" in *kernels*) exit 3;; *) echo "$*";; esac'
    fake = fake_python(host, fails)
    done = run(host, "kernels", PYTHON=fake, PAIR="small")
    assert done.returncode == 0 and "Triton" in done.stdout
    later = run(host, "profile", PYTHON=fake, PAIR="small").stdout
    assert "--attention-backend triton" in later and "--adaserve-attention triton" in later
    assert "--only adaserve:profile" in later
    chosen = run(host, "profile", PYTHON=fake, PAIR="small", ATTENTION="flashinfer").stdout
    assert "--attention-backend flashinfer" in chosen and "--again" not in chosen
    assert " --again " in run(host, "profile", PYTHON=fake, PAIR="small", AGAIN="1").stdout


@pytest.mark.parametrize(("capability", "listed"), [("9.0", "9.0a"), ("8.9", "none")])
def test_kernels_are_compiled_for_the_gpu_that_is_there(host: Path, capability: str, listed: str) -> None:
    fake = fake_python(host, 'echo "for ${FLASHINFER_CUDA_ARCH_LIST:-none}"')
    smi = host / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {capability}\n")
    smi.chmod(0o755)
    path = f"{host}{os.pathsep}{os.environ['PATH']}"
    assert f"for {listed}\n" in run(host, "plain", PYTHON=fake, PAIR="small", PATH=path).stdout


def test_our_own_attention_is_left_where_it_is_wrong(host: Path) -> None:
    fake = fake_python(host, 'case "$*" in *kernels*) exit 4;; *) echo "$*";; esac')
    assert run(host, "kernels", PYTHON=fake, PAIR="small").returncode == 0
    later = run(host, "plain", PYTHON=fake, PAIR="small").stdout
    assert "--attention-backend flashinfer" in later and "--adaserve-attention flashinfer" in later


def test_kernels_choose_anew(host: Path) -> None:
    """What an earlier run of the stage chose is forgotten, and another choice is another check."""
    spoilt = 'case "$*" in *.shapes*) exit 1;; *.kernels*) exit 3;; *) echo "$*";; esac'
    assert run(host, "kernels", PYTHON=fake_python(host, spoilt)).returncode == 0
    first = run(host, "plain", PYTHON=fake_python(host, spoilt)).stdout
    assert "--attention-backend triton" in first and "--size small" in first
    whole = spoilt.replace("exit 1", "exit 0").replace("exit 3", "exit 0")
    assert run(host, "kernels", PYTHON=fake_python(host, whole)).returncode == 0
    second = run(host, "plain", PYTHON=fake_python(host, whole)).stdout
    assert "--attention-backend flashinfer" in second and "--size large" in second
    folders = [re.findall(r"--out \S*/(\S+)", said) for said in (first, second)]
    assert folders == [["check-small-triton"], ["check-large-auto"]]


def test_stages_that_share_servers_are_one_check(host: Path) -> None:
    done = run(host, "smoke", "plain", "profile", "adaserve", PYTHON=fake_python(host, 'echo "$*"'))
    checks = [re.findall(r"--only (\S+)", line) for line in done.stdout.splitlines() if "gpu-check" in line]
    assert done.returncode == 0 and checks == [
        ["sglang:exactness", "adaserve:exactness"],
        ["sglang:exactness", "sglang:speed", "adaserve:profile", "adaserve:exactness", "adaserve:speed",
         "adaserve:verification"],
    ]  # fmt: skip


def test_all_servers_start_together(host: Path) -> None:
    """Before it is known whether AdaServe is exact. That is another check than one whose servers do not."""
    fake = fake_python(host, 'case "$*" in *"targets"*) exit 1;; *) echo "$*";; esac')
    said = run(
        host, "plain", "adaserve", "standalone", "mixed", PYTHON=fake, TOGETHER="1", FLAGS="--x 1"
    ).stdout
    first, *_ = checks(said)
    assert first[0] == "check-large-auto-together--x1"
    servers = {stage.partition(":")[0] for stage in first[2]}
    assert servers == {"sglang", "adaserve", "sglang-own-topk1", "sglang-own-topk2"}
    line = next(line for line in said.splitlines() if "gpu-check" in line)
    assert "--together" in line and "--max-total-tokens 50000" in line
    apart = run(host, "plain", PYTHON=fake).stdout
    assert "--together" not in apart and "--max-total-tokens 300000" in apart


def test_kernels_that_are_wrong_do_not_cost_the_rest(host: Path) -> None:
    """A host that is given back soon measures what it can; the call says that something is wrong."""
    wrong = fake_python(host, 'case "$*" in *.kernels*) exit 1;; *) echo "$*";; esac')
    done = run(host, "kernels", "smoke", "plain", PYTHON=wrong, PAIR="small")
    assert done.returncode == 2 and "no kernel that is right" in done.stdout
    assert "--only sglang:speed" in done.stdout, "smoke itself went well"


def test_kernels_that_could_not_be_looked_at_say_why(host: Path) -> None:
    broken = fake_python(host, 'case "$*" in *.kernels*) echo "no module named x" >&2; exit 1;; esac')
    assert "no module named x" in run(host, "kernels", PYTHON=broken, PAIR="small").stdout


def test_a_stage_that_fails_ends_the_chain(host: Path) -> None:
    fake = fake_python(host, 'echo "$*"; exit 2')
    done = run(host, "smoke", "plain", PYTHON=fake)
    assert done.returncode == 2 and "smoke is not done" in done.stdout and "check-" not in done.stdout


def checks(said: str) -> list[tuple[str, str, list[str]]]:
    """Folder, last flag and stages of every check that was asked for, by an interpreter that says so."""
    lines = (line for line in said.splitlines() if "gpu-check --device" in line)
    return [
        (
            re.findall(r"--out \S*/(\S+)", line)[0],
            re.findall(r"--flags .*?(\S+) --out", line)[0],
            re.findall(r"--only (\S+)", line),
        )
        for line in lines
    ]


WAYS = (
    "auto--disable-prefill-cuda-graph", "flashinfer", "auto--disable-cuda-graph",
    "flashinfer--disable-cuda-graph--disable-overlap-schedule",
)  # fmt: skip
"""How parts are turned off, one after the other, as folders of checks name it."""


def test_what_is_wrong_is_narrowed_down(host: Path) -> None:
    """A host is given back before anybody has read why its server did not start."""
    inexact = 'case "$*" in *"targets"*) exit 1;; *) echo "$*"; exit 3;; esac'
    done = run(host, "plain", "adaserve", "standalone", PYTHON=fake_python(host, inexact), PAIR="small")
    assert done.returncode == 2
    every = checks(done.stdout)
    folders = ["check-small-auto", *(f"smoke-{way}" for way in WAYS), "check-small-auto"]
    assert [folder for folder, _, _ in every] == folders
    assert [flag for _, flag, _ in every[1:5]] == [
        "--disable-prefill-cuda-graph", "flashinfer", "--disable-cuda-graph", "--disable-overlap-schedule",
    ]  # fmt: skip
    assert not any(stage.startswith("sglang-own") for stage in every[0][2])
    assert all(stage.startswith("sglang-own") for stage in every[5][2]), "with the time that is left"


@pytest.mark.parametrize(
    ("right", "tried"),
    [
        ("--disable-prefill-cuda-graph", 1),
        ("-flashinfer", 2),
        ("--disable-cuda-graph", 3),
        ("--disable-overlap-schedule", 4),
    ],
    ids=["prompts", "attention", "graphs", "all"],
)
def test_stages_go_on_without_what_is_wrong(host: Path, right: str, tried: int) -> None:
    """At once, with the same stages, until kernels are looked at again or the environment says otherwise."""
    exact = f'case "$*" in -c*{right}*) ;; -c*) exit 1;; *)'
    fake = fake_python(host, f'{exact} echo "$*"; case "$*" in *{right}*) ;; *) exit 2;; esac;; esac')
    stages, way = ("adaserve", "standalone"), WAYS[tried - 1]

    def folders(*words: str, **settings: str) -> list[str]:
        return [folder for folder, _, _ in checks(run(host, *words, PYTHON=fake, **settings).stdout)]

    done = run(host, *stages, PYTHON=fake, PAIR="small")
    assert done.returncode == 0, done.stdout
    tries = [f"smoke-{one}" for one in WAYS[:tried]]
    assert [f for f, _, _ in checks(done.stdout)] == ["check-small-auto", *tries, f"check-small-{way}"]
    assert folders("profile") == [f"check-large-{way}"]
    assert folders("profile", ATTENTION="auto", FLAGS="") == ["check-large-auto"]
    settings = {"PAIR": "small", "ATTENTION": "triton", "FLAGS": ""}
    asked = [f.replace("-auto", "-triton") for f in ("check-small-auto", *tries, "check-small-auto")]
    assert folders(*stages, **settings) == asked and run(host, *stages, PYTHON=fake, **settings).returncode
    fine = fake_python(host, 'echo "$*"')
    assert run(host, "kernels", PYTHON=fine, PAIR="small").returncode == 0
    assert folders("profile") == ["check-large-auto"]


def test_more_flags_are_another_check(host: Path) -> None:
    done = run(host, "profile", PYTHON=fake_python(host, 'echo "$*"'), FLAGS="--mem-fraction-static 0.8")
    ((folder, last, _),) = checks(done.stdout)
    assert (folder, last) == ("check-large-auto--mem-fraction-static0.8", "0.8")


def test_the_head_is_another_check(host: Path) -> None:
    """Of all stages, and it is the head that is made while kernels compile."""
    fake = fake_python(host, 'echo "$*"')
    done = run(host, "kernels", "smoke", "profile", PYTHON=fake, DRAFT="eagle3")
    assert [folder for folder, _, _ in checks(done.stdout)] == [
        "smoke-eagle3-auto",
        "check-large-eagle3-auto",
    ]
    lines = [line for line in done.stdout.splitlines() if "gpu-check" in line]
    assert len(lines) == 2 and all("--draft-kind eagle3" in line for line in lines)
    (made,) = saved(host, "widening.log")
    assert made.split() == ["-m", "adaserve.bench.gpu_check.shapes", "eagle3"]


def test_the_large_pair_alone_is_no_reason_to_turn_anything_off(host: Path) -> None:
    """It may have run out of memory or of time, and the same stages with Triton would again."""
    unfit = 'case "$*" in *"targets"*) exit 1;; *check-large*) echo "$*"; exit 2;; *) echo "$*";; esac'
    done = run(host, "adaserve", "standalone", PYTHON=fake_python(host, unfit), PAIR="large")
    every = checks(done.stdout)
    assert done.returncode == 2 and "none is turned off" in done.stdout
    assert [folder for folder, _, _ in every] == ["check-large-auto", "smoke-auto", "check-large-auto"]
    assert all(stage.startswith("sglang-own") for stage in every[2][2]), "with the time that is left"
    wrong = fake_python(host, unfit.replace("*check-large*", "*check-large*|*smoke-auto*"))
    said = run(host, "adaserve", PYTHON=wrong, PAIR="large").stdout
    folders = ["check-large-auto", "smoke-auto", "smoke-auto--disable-prefill-cuda-graph", "smoke-flashinfer"]
    folders += ["check-large-flashinfer", "smoke-flashinfer"]
    assert [folder for folder, _, _ in checks(said)] == folders and "none is turned off" in said


def test_the_time_is_up(host: Path) -> None:
    """Before the call's own limit, so that there is time to stop servers and to save."""
    fake = fake_python(host, "exec sleep 60")
    start_s = time.monotonic()
    done = run(host, "plain", PYTHON=fake, DEADLINE="12")
    assert time.monotonic() - start_s < 30
    assert done.returncode == 2 and "the time was up" in done.stdout
    late = run(host, "plain", "adaserve", PYTHON=fake_python(host, "exit 1"), DEADLINE="9")
    assert late.returncode == 2 and "the time was up" in late.stdout
    assert "did not start" not in late.stdout, "AdaServe is not to blame"


def test_what_compiles_too_long_does_not_cost_the_others(host: Path) -> None:
    """What they found is written down when the slowest one is given up: before the deadline, then."""
    for deadline, limit in (("200", range(150, 171)), ("3000", [240])):
        done = run(host, "kernels", PYTHON=fake_python(host, 'echo "$*"'), PAIR="small", DEADLINE=deadline)
        (given,) = re.findall(r"--limit (\d+)", done.stdout)
        assert int(given) in limit


MIB = 1 << 20


def test_what_is_fetched_is_little_and_flat(host: Path) -> None:
    """A call brings back eight files of 16 MiB at most, two folders down."""
    work = host / ".local" / "gpu-stages"
    for folder, batches in (("check-small-triton", (1, 32)), ("check-large-auto", (1, 4, 8, 16, 32, 64))):
        for batch in batches:
            trace = work / folder / "profiles" / f"batch-{batch}" / "1764-TP-0.trace.json.gz"
            trace.parent.mkdir(parents=True)
            trace.write_bytes(bytes([batch]) * (17 * MIB if batch == 64 else 100))
        (work / folder / "gpu-check.json").write_text(f'"{folder}"')
        os.utime(work / folder / "gpu-check.json", (1.0, 1.0 + ("large" in folder)))
    runs = work / "check-large-auto" / "mixed-0.5" / "priced"
    runs.mkdir(parents=True)
    (runs / "requests.csv").write_bytes(os.urandom(17 * MIB))
    done = run(host, "profile", PYTHON=fake_python(host, "exit 0"))
    assert "batch-64" in done.stdout and "16 MiB" in done.stdout
    fetched = [path for path in (host / "out").rglob("*") if path.is_file()]
    assert len(fetched) <= 8 and all(path.parent == host / "out" for path in fetched)
    assert all(path.stat().st_size <= 16 * MIB for path in fetched)
    assert (host / "out" / "gpu-check.json").read_text() == '"check-large-auto"'
    assert (host / "out" / "trace-check-large-auto-batch-32.json.gz").read_bytes() == bytes([32]) * 100
    assert saved(host, "check-small-triton/gpu-check.json") == ['"check-small-triton"']
    later = work / "smoke-auto" / "gpu-check.json"
    later.parent.mkdir()
    later.write_text("{}")
    run(host, "profile", PYTHON=fake_python(host, "exit 0"))
    assert (host / "out" / "gpu-check.json").read_text() == '"check-large-auto"', "not what narrowed it down"


def test_older_traces_give_way_to_newer_ones(host: Path) -> None:
    """What is saved meanwhile counts as well: those of earlier calls come first, and are five already."""
    profiles = host / ".local" / "gpu-stages" / "check-large-auto" / "profiles"
    for batch in range(1, 6):
        (profiles / f"batch-{batch}").mkdir(parents=True)
        (profiles / f"batch-{batch}" / "trace.json").write_text("{}")
        os.utime(profiles / f"batch-{batch}" / "trace.json", (batch, batch))
    for batch in (6, 7):
        run(host, "profile", PYTHON=fake_python(host, "exit 0"))
        (profiles / f"batch-{batch}").mkdir()
        (profiles / f"batch-{batch}" / "trace.json").write_text("{}")
        os.utime(profiles / f"batch-{batch}" / "trace.json", (batch, batch))
    run(host, "profile", PYTHON=fake_python(host, "exit 0"))
    kept = sorted(path.name for path in (host / "out").glob("trace-*"))
    assert kept == [f"trace-check-large-auto-batch-{batch}.json" for batch in range(3, 8)]


def test_a_call_that_is_killed_has_saved(host: Path) -> None:
    """SIGKILL leaves no time for a last word."""
    found = host / ".local" / "gpu-stages" / "check-small-auto" / "gpu-check.json"
    fake = fake_python(host, f"mkdir -p {found.parent}; echo {{}} >{found}; exec sleep 60")
    env = {**os.environ, "PYTHON": fake, "OUT": str(host / "out"), "SAVE_EVERY": "0.2", "PAIR": "small"}
    command = ["bash", str(host / "scripts" / SCRIPT.name), "plain"]

    def is_saved() -> bool:
        with suppress(OSError, KeyError):
            report = (host / "out" / "gpu-check.json").read_text()
            return [report, *saved(host, "check-small-auto/gpu-check.json")] == ["{}\n"] * 2
        return False

    stages = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    end_s = time.monotonic() + 120
    while not is_saved():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    os.killpg(stages.pid, signal.SIGKILL)
    stages.wait()
    assert is_saved()


@pytest.mark.parametrize("stage", ["smoke", "plain", "adaserve", "standalone", "profile", "mixed"])
@pytest.mark.parametrize("status", [1, 2])
def test_a_stage_that_failed_does_not_send_on(host: Path, stage: str, status: int) -> None:
    """Neither after a check that says so nor after one that crashed; a missed target is not a failure."""
    fake = host / "python"
    fake.write_text(f"#!/bin/sh\nexit {status}\n")
    fake.chmod(0o755)
    failed = run(host, stage, PYTHON=str(fake), PAIR="small")
    assert failed.returncode == 2 and "is not done" in failed.stdout
    assert not re.search(r"[Nn]ext: |have run", failed.stdout)
    fake.write_text('#!/bin/sh\ncase "$*" in -c*) ;; *) exit 3;; esac\n')
    missed = run(host, stage, PYTHON=str(fake), PAIR="small")
    assert (
        missed.returncode == 0 and re.search(r"[Nn]ext|therwise|have run", missed.stdout)
    ) or stage == "smoke"


def test_stages_name_sections_of_the_check(tmp_path: Path) -> None:
    from rich.console import Console

    from adaserve.bench.gpu_check.check import Check
    from adaserve.bench.gpu_check.findings import CheckPlan
    from adaserve.bench.gpu_check.systems import OWN, Pair

    named = re.findall(r"\b((?:sglang|adaserve)[a-z0-9-]*:[a-z0-9-]+)\b", SCRIPT.read_text())
    assert len(named) >= 8
    Check(Pair("t", "d", "cuda"), CheckPlan(), tmp_path, Console(quiet=True), only=named)
    assert all(kind in SCRIPT.read_text() for kind in OWN)


def test_the_interpreter_is_the_one_that_has_pytorch(host: Path) -> None:
    """On some hosts ``python`` is another one, or is not there."""
    folder = host / "bin"
    folder.mkdir()
    for name, answer in (("python", "exit 1"), ("python3", 'echo "$0 $*"')):
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    done = run(host, "profile", PYTHON="", PAIR="small", PATH=f"{folder}:{os.environ['PATH']}")
    assert f"{folder}/python3 -m adaserve.cli gpu-check" in done.stdout
    told = run(host, "profile", PYTHON=f"{folder}/python3", PAIR="small", PATH="/usr/bin:/bin")
    assert f"{folder}/python3 -m adaserve.cli gpu-check" in told.stdout


def test_bytecode_is_kept(host: Path) -> None:
    """Some hosts turn it off, and each process of each server would compile what it imports."""
    fake = fake_python(host, 'echo "keeps: ${PYTHONDONTWRITEBYTECODE-yes}"')
    assert "keeps: yes" in run(host, "profile", PYTHON=fake, PYTHONDONTWRITEBYTECODE="1").stdout


def test_kernels_are_those_of_the_embedded_pairs(host: Path) -> None:
    """Others are compiled only where they are asked for: compiling takes most of the stage's time."""
    said = [run(host, "kernels", PYTHON=fake_python(host, 'echo "$*"'), PAIR="small", EVERY=every).stdout
            for every in ("", "1")]  # fmt: skip
    assert [" --every" in text for text in said] == [False, True]


@pytest.mark.parametrize("stage", ["facts", "kernels", "plain"])
def test_nothing_is_waited_for_without_a_limit(host: Path, stage: str) -> None:
    """Facts that never come, a large pair that is never made, and a server that never starts."""
    hangs = 'case "$*" in *gpu-check*) echo "$*";; *.kernels*) ;; *) exec sleep 60;; esac'
    start_s = time.monotonic()
    done = run(host, stage, PYTHON=fake_python(host, hangs), LIMIT="1")
    assert time.monotonic() - start_s < 30
    said = {"facts": "took too long", "kernels": "go on with the small one", "plain": "--stage-limit 1 "}
    assert said[stage] in done.stdout and done.returncode == (2 if stage == "facts" else 0)


def test_code_that_was_mended_is_what_runs(host: Path) -> None:
    """Also where the bundle is not unpacked again."""
    for folder in ("adaserve", "scheduler", "patches", "loadgen", "site/adaserve"):
        (host / folder).mkdir(parents=True)
        (host / folder / "code.py").write_text(folder)
    run(host, "profile", PYTHON=fake_python(host, "exit 0"))
    site = host / "site" / "adaserve"
    assert (site / "code.py").read_text() == "adaserve"
    assert (site / "patches" / "code.py").read_text() == "patches"


def test_compilers_have_a_home(host: Path) -> None:
    fake = fake_python(host, 'echo "home $HOME"')
    assert (
        f"home {host}/.local/home\n" in run(host, "profile", PYTHON=fake, HOME=str(host / "missing")).stdout
    )
    assert f"home {host}\n" in run(host, "profile", PYTHON=fake, HOME=str(host)).stdout


def test_without_compilers_sglang_has_torch_s_operators(host: Path) -> None:
    for note, backend in (("nvcc missing: SGLang and", "torch"), ("less than 22 GB free", "")):
        fake = fake_python(host, f'echo "note: {note}" >&2; echo "backend <$SGLANG_FORCE_FUSED_OP_BACKEND>"')
        assert run(host, "facts", PYTHON=fake).returncode == 0
        assert f"backend <{backend}>" in run(host, "profile", PYTHON=fake).stdout


def test_kernels_of_sglang_that_are_wrong_serve_nobody(host: Path) -> None:
    """Until they are right: every server would end in its first forward."""
    found = host / ".local" / "gpu-stages" / "kernels.json"
    for right, backend in ((False, "torch"), (True, "")):
        results = {"flashinfer": {"right": not right}, "sglang": {"right": right, "seconds": 1.0}}
        writes = f"cat >{found} <<END\n{json.dumps(results, indent=1)}\nEND\n"
        says = 'echo "$* backend <$SGLANG_FORCE_FUSED_OP_BACKEND>"'
        fake = fake_python(host, f'case "$*" in *.kernels*) {writes};; *) {says};; esac')
        assert run(host, "kernels", PYTHON=fake, PAIR="small").returncode == 0
        said = run(host, "profile", PYTHON=fake).stdout
        assert f"backend <{backend}>" in said
        ((folder, _, _),) = checks(said)
        assert folder == ("check-large-auto" if right else "check-large-auto-torch"), "another check"


def test_prefills_that_cannot_be_captured_run_without_graphs(host: Path) -> None:
    """Until they can be: no server would start."""
    found = host / ".local" / "gpu-stages" / "kernels.json"
    for right in (False, True):
        writes = f"cat >{found} <<END\n{json.dumps({'prefills': {'right': right}}, indent=1)}\nEND\n"
        fake = fake_python(host, f'case "$*" in *.kernels*) {writes};; *) echo "$*";; esac')
        assert run(host, "kernels", PYTHON=fake, PAIR="small").returncode == 0
        said = run(host, "profile", PYTHON=fake).stdout
        assert ("--disable-prefill-cuda-graph" in said) != right
        assert "--cuda-graph-bs-prefill 1 2 4" in said


def test_what_is_saved_is_written_by_one_at_a_time(host: Path) -> None:
    """A saver that was ended in the middle leaves a program behind that still writes."""
    (host / ".local").mkdir()
    with (host / ".local" / "gpu-stages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {**os.environ, "PYTHON": fake_python(host, "exit 0"), "OUT": str(host / "out")}
        command = ["bash", str(host / "scripts" / SCRIPT.name), "profile"]
        stages = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            stages.wait(2)
        assert not list((host / "out").iterdir())
    assert stages.wait(20) == 0 and (host / "out" / "gpu-stages.tar.gz").exists()

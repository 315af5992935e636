"""A server that is stopped while it starts ends at once, with one line, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from adaserve.host.lifetime import PARENT_ENV

STARTING = """
import multiprocessing, os, subprocess, sys, time
multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("started", flush=True)
try:
    time.sleep(60)
except BaseException:
    time.sleep(60)  # as a library may that waits for something else
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_that_starts_is_stopped(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "starting.py").write_text(STARTING)
    process = subprocess.Popen(
        [sys.executable, "-m", "adaserve.launch", "starting"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert said == f"adaserve: stopped by {number.name}\n"
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


ENDING = """
import mmap, sys
file = open(sys.argv[1], "r+b")
sys.held = mmap.mmap(file.fileno(), 9)  # as a module of SGLang holds it
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_server_that_ends_leaves_no_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(ENDING)
    shared = Path(f"/dev/shm/sglang_loads_test{os.getpid()}.shm")
    shared.write_bytes(bytes(9))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "adaserve.launch", "starting", str(shared)],
            cwd=tmp_path, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and not shared.exists()
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="this system does not say who has what mapped"
)
@pytest.mark.parametrize(("folder", "stays"), [("tmpab_12cd4", False), ("metrics", True)])
def test_a_server_that_ends_leaves_no_counters(folder: str, stays: bool, tmp_path: Path) -> None:
    """SGLang's own folder for them goes, and one that users have named stays."""
    (tmp_path / "starting.py").write_text(ENDING)
    counters = tmp_path / folder / "counter_1.db"
    counters.parent.mkdir()
    counters.write_bytes(bytes(9))
    command = [sys.executable, "-m", "adaserve.launch", "starting", str(counters)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    told = {**env, "PROMETHEUS_MULTIPROC_DIR": str(counters.parent)}
    assert subprocess.run(command, cwd=tmp_path, env=told, timeout=60, check=False).returncode == 0
    assert counters.exists(), "others may use it"
    assert subprocess.run(command, cwd=tmp_path, env=env, timeout=60, check=False).returncode == 0
    assert counters.parent.exists() == stays


def test_a_server_that_is_refused_leaves_no_counters(tmp_path: Path) -> None:
    """Those of a scheduler that has ended: no process has them mapped any more."""
    (tmp_path / "starting.py").write_text(
        "import os, sys; os.environ['PROMETHEUS_MULTIPROC_DIR'] = sys.argv[1]; raise ValueError"
    )
    counters = tmp_path / "tmpab_12cd4" / "counter_1.db"
    counters.parent.mkdir()
    counters.touch()
    command = [sys.executable, "-m", "adaserve.launch", "starting", str(counters.parent)]
    told = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(counters.parent)}
    subprocess.run(command, cwd=tmp_path, env=told, timeout=60, check=False)
    assert counters.exists(), "others may use it"
    subprocess.run(command, cwd=tmp_path, timeout=60, check=False)
    assert not counters.parent.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_model_in_shared_memory_outlives_the_server(tmp_path: Path) -> None:
    """People keep models there, since they load fast; whoever reads one has its file mapped."""
    (tmp_path / "starting.py").write_text(ENDING)
    folder = Path(f"/dev/shm/adaserve-test-{os.getpid()}")
    folder.mkdir()
    weights = folder / "model.safetensors"
    try:
        weights.write_bytes(bytes(9))
        command = [sys.executable, "-m", "adaserve.launch", "starting", str(weights)]
        assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 0
        assert weights.exists()
    finally:
        shutil.rmtree(folder)


def test_settings_that_cannot_be_served_are_said_in_one_line(tmp_path: Path) -> None:
    code = "from adaserve.config import ConfigError\nraise ConfigError('use --page-size 1')"
    (tmp_path / "starting.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "adaserve.launch", "starting"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: use --page-size 1\n")


def test_another_sglang_is_named_before_anything_is_imported_from_it(tmp_path: Path) -> None:
    """It would say that it knows no ADASERVE, since our plugin cannot be loaded there."""
    (tmp_path / "starting.py").write_text("import sglang.gone")
    found = tmp_path / "sglang-0.5.24.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    done = subprocess.run(
        [sys.executable, "-m", "adaserve.launch", "starting"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        "error: This is sglang 0.5.24. AdaServe was made for sglang 0.5.23: pip install sglang==0.5.23\n",
    )


def test_tools_of_sglang_know_our_plugin(tmp_path: Path) -> None:
    """Those that start an engine themselves load plugins with it, and read their flags before that."""
    plugins = tmp_path / "sglang" / "srt" / "plugins.py"
    plugins.parent.mkdir(parents=True)
    for package in plugins.parents[:2]:
        (package / "__init__.py").touch()
    plugins.write_text("def load_plugins(): print('plugins')")
    (tmp_path / "sglang" / "tool.py").write_text("print('flags')")
    command = [sys.executable, "-m", "adaserve.launch", "sglang.tool"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True, timeout=60) == "plugins\nflags\n"


ASKS = "sglang.srt.arg_groups.overrides"


@pytest.mark.parametrize(
    ("places", "code", "kind"),
    [
        ((ASKS,), 2, "ValueError"),
        ((ASKS, "sglang.srt.configs.model_config"), 2, "OSError"),  # of a model's folder
        (("sglang.srt.server",), 1, "ValueError"),
        ((ASKS, "adaserve.algorithm"), 1, "ValueError"),
    ],
)
def test_so_are_settings_that_sglang_refuses(
    tmp_path: Path, places: tuple[str, ...], code: int, kind: str
) -> None:
    """By an exception without a name of its own, which may also be a fault: ours, if it is our code's."""
    (tmp_path / "starting.py").write_text(
        f"asked, body = None, 'raise {kind}(\"no\")'\n"
        f"for place in reversed({places!r}):\n"
        "    there = {'__name__': place, 'asked': asked}\n"
        "    exec(f'def check(): {body}', there)\n"
        "    asked, body = there['check'], 'asked()'\n"
        "asked()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "adaserve.launch", "starting"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert (done.stderr == "error: no\n") == (code == 2)


def test_the_command_is_quiet_before_its_modules_are_there() -> None:
    code = (
        "import signal, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'adaserve.cli': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from adaserve.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


COMMAND = f"""
import os, subprocess, sys
environment = {{**os.environ, {PARENT_ENV!r}: str(os.getpid())}}
subprocess.run([sys.executable, "-m", "adaserve.launch", "starting"], env=environment)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process of its parent's end")
def test_a_server_that_starts_ends_with_its_command(tmp_path: Path) -> None:
    """SGLang, which calls our plugin, is imported for half a minute first."""
    (tmp_path / "starting.py").write_text(STARTING)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) == 3
    process.kill()
    process.wait()
    assert not psutil.wait_procs(processes, timeout=10)[1]

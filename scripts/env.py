#!/usr/bin/env python3
"""Makes .venv, the environment that `make demo`, `make test` and `make check` run in.

SGLang, PyTorch and their libraries take about 11 GB, so they are installed once, in a folder of the user's
cache named after what is pinned, and shared by all clones. A clone's own .venv holds links to them and an
editable install of the clone: small, made in seconds, and never in another clone's way.

Needs nothing but the standard library, and runs on any Python 3.7+ far enough to say what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHONS = ((3, 12), (3, 11))  # those for which every pinned package has a wheel
NEEDED_GB = 14  # the finished environment and, while it is made, the wheels it is made from
UNUSED_S = 24 * 3600  # an older environment that no clone has used for this long is removed
COMPLETE, OURS = "adaserve-complete", "adaserve-overlay"


class EnvError(Exception):
    """The environment cannot be made here; the message says what to do."""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        require_host()
        ensure()
    except EnvError as error:
        print(f"adaserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nadaserve: interrupted; the next run starts the installation anew", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"adaserve: {error.filename}: {error.strerror}. The environment needs this folder and the user's "
            "cache, or the folder that ADASERVE_ENV names, to be writable",
            file=sys.stderr,
        )
        return 1
    return 0


# -- what the host must have ------------------------------------------------------------------


def require_host() -> None:
    """Raises EnvError, or continues in a Python that fits when this one does not."""
    if Path(sys.prefix).resolve() == VENV:  # activated: it may have to be made anew, and not by itself
        os.execv(sys._base_executable, [sys._base_executable, *sys.argv])
    if sys.version_info[:2] not in PYTHONS:
        switch_python()
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if missing:
        raise EnvError(
            f"{sys.executable} lacks the module {missing[0]}: install it (Debian and Ubuntu: "
            f"apt install python3-venv) or choose another Python with make PYTHON=/path/to/python3"
        )
    if os.name != "posix":
        raise EnvError("SGLang runs on Linux: on Windows, work inside WSL")


def switch_python() -> None:
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            os.execv(found, [found, *sys.argv])
    have = ".".join(map(str, sys.version_info[:3]))
    raise EnvError(
        f"Python 3.11 or 3.12 is needed and this is {have} ({sys.executable}): SGLang 0.5.23 and its "
        "libraries have wheels for those two. Install one, then: make PYTHON=/path/to/python3.12"
    )


def require_disk(folder: Path) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < NEEDED_GB:
        raise EnvError(
            f"the first run needs {NEEDED_GB} GB of disk and {folder} has {free_gb:.1f} GB free: free some, "
            "or set ADASERVE_ENV to a folder on a larger disk"
        )


# -- the shared environment -------------------------------------------------------------------


def ensure() -> None:
    """Brings the shared environment and this clone's .venv up to date; nothing to do takes 0.1 s."""
    shared = shared_folder()
    if not (is_complete(shared) and overlay_is_current(shared)):
        with locked(shared.parent):
            if not is_complete(shared):
                install_shared(shared)
            if not overlay_is_current(shared):
                make_overlay(shared)
    if (shared / COMPLETE).exists():
        os.utime(shared / COMPLETE)  # in use


def shared_folder() -> Path:
    if os.environ.get("ADASERVE_ENV"):
        return Path(os.environ["ADASERVE_ENV"]).expanduser().absolute()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise EnvError("this user has no home folder: set XDG_CACHE_HOME to a folder for the cache") from None
    return cache / "adaserve" / f"env-{key()}"


def key() -> str:
    """Changes with what is pinned and with the Python it is for, not with other settings of the project."""
    parts = [*requirements(), (ROOT / "constraints.txt").read_text(), platform.machine(), python_tag()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def python_tag() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def requirements() -> list[str]:
    """What the project with all its extras, its tests and its build need, whoever of them needs it."""
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [data["build-system"]["requires"], data["project"]["dependencies"]]
    groups += data["project"]["optional-dependencies"].values()
    return sorted({requirement for group in groups for requirement in group})


def is_complete(shared: Path) -> bool:
    """Whether the folder is an environment we finished, or one somebody else made and pointed us to."""
    if not (shared / "bin" / "python").exists():
        return False
    return (shared / COMPLETE).exists() or not shared.name.startswith("env-")


@contextlib.contextmanager
def locked(folder: Path):
    """One installation at a time; the system lets go of the lock however the process ends."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "env.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("adaserve: another run is making the environment; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_shared(shared: Path) -> None:
    if shared.exists() and any(shared.iterdir()) and not (shared / OURS).exists():
        raise EnvError(
            f"{shared} is not empty and was not made by AdaServe: set ADASERVE_ENV to another folder"
        )
    print(
        "adaserve: first run. SGLang, PyTorch and their libraries are installed: about 11 GB on disk in\n"
        f"  {shared}\n  4 to 8 minutes on a fast line. Later runs and other clones use them as they are.",
        flush=True,
    )
    remove_tree(shared)
    if shutil.disk_usage(shared.parent).free < NEEDED_GB * 1e9:
        remove_unused(shared, 3600)  # short of disk: all but what was used within the hour
    require_disk(shared.parent)
    shared.mkdir(parents=True)
    (shared / OURS).touch()
    try:
        subprocess.run([sys.executable, "-m", "venv", str(shared)], check=True)
        pip_install(shared)
        (shared / COMPLETE).touch()
    except subprocess.CalledProcessError as error:
        raise EnvError(f"the environment could not be made: {error}") from error
    finally:
        remove_tree(shared / "tmp")
        if not (shared / COMPLETE).exists():
            print("adaserve: removing the unfinished environment", file=sys.stderr, flush=True)
            remove_tree(shared)
    remove_unused(shared, UNUSED_S)


def pip_install(shared: Path) -> None:
    """Runs pip with its output in a log, and one line of progress."""
    log_path = shared.with_name(shared.name + ".log")
    command = [str(shared / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--prefer-binary",
        "-c",
        str(ROOT / "constraints.txt"),
        *requirements(),
    ]
    # pip unpacks gigabytes into TMPDIR, and /tmp is often a small disk in memory.
    scratch = shared / "tmp"
    scratch.mkdir()
    env = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    env.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
    )
    assert process.stdout is not None
    progress = Progress(total=count_pins())
    try:
        with open(log_path, "w", buffering=1) as log:
            for line in process.stdout:
                log.write(line)
                progress.line(line)
        code = process.wait()
    finally:
        progress.end()
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0:
        tail = "".join(log_path.read_text(errors="replace").splitlines(keepends=True)[-15:])
        raise EnvError(f"pip failed ({code}); the end of {log_path}:\n{tail}")
    log_path.unlink()


def count_pins() -> int:
    return len(re.findall(r"^[A-Za-z0-9]", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


class Progress:
    """Packages found so far, on one line of a terminal, or on a line every half minute elsewhere. pip says
    nothing while it unpacks, so a thread keeps the clock going."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.found: set[str] = set()
        self.start = time.monotonic()
        self.tty = sys.stdout.isatty()
        self.installing = False
        self.over = threading.Event()
        self.clock = threading.Thread(target=self.tick, daemon=True)
        self.clock.start()

    def line(self, text: str) -> None:
        name = re.match(r"Collecting ([A-Za-z0-9._-]+)", text)
        if name:
            self.found.add(re.sub(r"[-_.]+", "-", name.group(1)).lower())
        if text.startswith("Installing collected"):
            self.installing = True

    def tick(self) -> None:
        while not self.over.wait(0.5 if self.tty else 30):
            what = f"downloading: {min(len(self.found), self.total)} of {self.total} packages"
            if self.installing:
                what = "unpacking: 1 to 4 minutes"
            elapsed = int(time.monotonic() - self.start)
            text = f"  {elapsed // 60}:{elapsed % 60:02}  {what}"
            print(f"\r\033[K{text}" if self.tty else text, end="" if self.tty else "\n", flush=True)

    def end(self) -> None:
        self.over.set()
        self.clock.join()
        elapsed = time.monotonic() - self.start
        print(f"{chr(10) if self.tty else ''}  done after {elapsed / 60:.1f} minutes", flush=True)


def remove_unused(keep: Path, older_than_s: float) -> None:
    """Removes our other environments: unfinished ones, and finished ones in which no Python has been started
    for a while and none runs."""
    for folder in keep.parent.glob("env-*"):
        mark = folder / COMPLETE
        if folder == keep or not (folder / OURS).exists():
            continue
        unused = not mark.exists() or time.time() - mark.stat().st_mtime > older_than_s
        if unused and not is_running(folder):
            print(f"adaserve: removing the unused environment {folder}", flush=True)
            remove_tree(folder)


def is_running(folder: Path) -> bool:
    """Whether a process of this user has loaded a library of the environment."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f" {folder}/" in maps.read_text(errors="replace"):
                return True
    return False


def remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


# -- the clone's own .venv --------------------------------------------------------------------


def overlay_stamp(shared: Path) -> str:
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return json.dumps(
        {"root": str(ROOT), "shared": str(shared), "python": python_tag(), "pyproject": pyproject}
    )


def overlay_is_current(shared: Path) -> bool:
    stamp = VENV / OURS
    return (
        (VENV / "bin" / "python").exists() and stamp.exists() and stamp.read_text() == overlay_stamp(shared)
    )


def make_overlay(shared: Path) -> None:
    if VENV.exists() and not (VENV / OURS).exists():
        raise EnvError(f"{VENV} was made by something else: move it away, make needs the name")
    remove_tree(VENV)
    VENV.mkdir()
    (VENV / OURS).touch()  # ours, and unfinished
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], check=True)
        packages = Path("lib") / python_tag() / "site-packages"
        # Ours comes first in sys.path; zz sorts it after the editable install's own .pth file.
        mark = str(shared / COMPLETE)
        line = f"import os, site; site.addsitedir({str(shared / packages)!r}); "
        line += f"os.access({mark!r}, os.W_OK) and os.utime({mark!r})  # in use\n"
        (VENV / packages / "zz_adaserve_shared.pth").write_text(line)
        link_scripts(shared)
        command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-build-isolation", "--ignore-installed", "-e", str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except subprocess.CalledProcessError as error:
        raise EnvError(f"{VENV} could not be made: {error}") from error
    if done.returncode != 0:
        raise EnvError(f"the project could not be installed into {VENV}:\n{done.stdout}{done.stderr}")
    (VENV / OURS).write_text(overlay_stamp(shared))


def link_scripts(shared: Path) -> None:
    """Gives .venv/bin the shared commands; those written in Python must start with .venv's Python."""
    old, new = str(shared / "bin" / "python").encode(), str(VENV / "bin" / "python").encode()
    for script in sorted((shared / "bin").iterdir()):
        target = VENV / "bin" / script.name
        if target.exists() or script.name.startswith(("python", "activate", "Activate")):
            continue
        with open(script, "rb") as file:
            head = file.read(2)
        if head == b"#!":
            text = script.read_bytes().replace(old, new, 2)
            first = b"#!" + new + b"\n"
            if text.startswith(first):  # as pip does where that line would hold spaces, or be too long
                text = b"#!/bin/sh\n'''exec' \"" + new + b'" "$0" "$@"\n\' \'\'\'\n' + text[len(first) :]
            target.write_bytes(text)
            target.chmod(0o755)
        else:
            target.symlink_to(script)


if __name__ == "__main__":
    sys.exit(main())

"""The environment that `make` makes: what it says where it cannot be made."""

from __future__ import annotations

import mmap
import os
import pwd
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "env.py"


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {**os.environ, "ADASERVE_ENV": str(tmp_path / "file" / "env")}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and str(tmp_path / "file") in line and "ADASERVE_ENV" in line


def test_a_user_without_a_home_folder_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "ADASERVE_ENV"):
        monkeypatch.delenv(name, raising=False)
    script = runpy.run_path(str(SCRIPT))
    with pytest.raises(script["EnvError"], match="set XDG_CACHE_HOME"):
        script["shared_folder"]()


def test_an_environment_in_use_is_not_removed(tmp_path: Path) -> None:
    """However long ago `make` was told of it."""
    script = runpy.run_path(str(SCRIPT))
    old, new = tmp_path / "env-old", tmp_path / "env-new"
    old.mkdir()
    (old / script["OURS"]).touch()
    (old / script["COMPLETE"]).touch()
    os.utime(old / script["COMPLETE"], (0, 0))
    (old / "library.so").write_bytes(b"loaded")
    with (old / "library.so").open() as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        script["remove_unused"](new, 3600)
        assert old.exists()
    script["remove_unused"](new, 3600)
    assert not old.exists()


def test_commands_run_in_a_clone_whose_path_has_spaces(tmp_path: Path) -> None:
    """Linux reads a script's first line up to the first space."""
    link_scripts = runpy.run_path(str(SCRIPT))["link_scripts"]
    shared, venv = tmp_path / "shared", tmp_path / "a clone" / ".venv"
    for folder in (shared, venv):
        (folder / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    command = shared / "bin" / "command"
    command.write_text(f"#!{shared}/bin/python\n# -*- coding: utf-8 -*-\nimport sys\nprint(sys.argv[1:])\n")
    link_scripts.__globals__["VENV"] = venv
    link_scripts(shared)
    done = subprocess.run(
        [venv / "bin" / "command", "one word", "2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "['one word', '2']\n"), done.stderr

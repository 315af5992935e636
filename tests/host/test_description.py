"""How a host is described beside every figure."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from adaserve.host import description


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_that_of_this_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody installs it below a repository of theirs, whose commits say nothing of it."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    installed = tmp_path / ".venv" / "description.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(description, "__file__", str(installed))
    assert description.git_sha() is None
    git("add", ".venv")
    git("commit", "-q", "-m", "ours")
    commit = description.git_sha()
    assert commit is not None and len(commit) == 12
    installed.write_text("changed")
    assert description.git_sha() == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("flags\t: avx2\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: B\n", "A CPU @ 2 GHz"),
        ("CPU part\t: 0xd0c\n", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_a_processor_without_a_name_has_that_of_its_architecture(
    cpuinfo: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(_: Path) -> str:
        if cpuinfo is None:
            raise FileNotFoundError
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", str)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert description.cpu_name() == name

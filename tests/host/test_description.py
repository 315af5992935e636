"""How a host is described beside every figure."""

from __future__ import annotations

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

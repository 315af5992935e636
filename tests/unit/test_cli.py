"""The command line: what it makes of its options, and what it says to wrong ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve import server
from adaserve.cli import app
from adaserve.config import ENV


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that take this process's place, which none does here."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: commands.append(words))
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return commands


def test_two_draft_models(started: list[list[str]], tmp_path: Path) -> None:
    words = ["--model-path", "m", "--draft-model-path", "d", "--second-draft", str(tmp_path)]
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    (command,) = started
    assert command[command.index("--speculative-draft-model-path") + 1] == "d"
    config = json.loads(os.environ[ENV])
    assert (config["second_draft"], config["drafts"]) == (str(tmp_path), "model")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--draft-model-path", "d", "--second-draft", "gone"], "there is no folder gone"),
        (["--second-draft", "lab/model"], "a second draft model has no use"),
    ],
)
def test_a_second_draft_model_that_cannot_be_served(
    started: list[list[str]], words: list[str], says: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "--model-path", "m", *words])
    assert result.exit_code == 2 and says in result.output and not started

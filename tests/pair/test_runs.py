"""A training run goes on with its own earlier part only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.pair import export, runs
from adaserve.pair.eagle import HeadShape
from adaserve.pair.folders import HEAD, PairError, weights_folder
from adaserve.pair.train import Run


def test_the_same_run_goes_on_until_it_is_finished(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"minutes": 20.0, "seed": 0}
    runs.begin(folder, settings)
    (folder / "checkpoint.pt").touch()
    runs.begin(folder, settings)
    runs.finish(folder, settings)
    for given in (settings, {"minutes": 40.0, "seed": 0}):
        with pytest.raises(PairError, match="finished: delete that folder"):
            runs.begin(folder, given)


def test_a_run_with_other_settings_is_refused_with_what_differs(tmp_path: Path) -> None:
    runs.begin(tmp_path, {"minutes": 20.0, "seed": 0})
    with pytest.raises(PairError, match=r"\(minutes was 20\.0, is 40\.0, mlp was None, is 64\): give the"):
        runs.begin(tmp_path, {"minutes": 40.0, "seed": 0, "mlp": 64})
    runs.begin(tmp_path, {"minutes": 20.0, "seed": 0})


def test_a_run_that_noted_no_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(PairError, match="settings are not known"):
        runs.begin(tmp_path, {"seed": 0})


def test_heads_go_on_from_their_own_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[HeadShape] = []

    def train_eagle(run: Run, pair: Path, *, written_tokens: int, shape: HeadShape) -> Path:
        trained.append(shape)
        if len(trained) == 1:
            raise KeyboardInterrupt
        return shutil.copytree(pair / HEAD, run.out / "head")

    monkeypatch.setattr(export, "train_eagle", train_eagle)
    (tmp_path / "corpus").mkdir()
    for name in ("train.jsonl", "tokens.json"):
        (tmp_path / "corpus" / name).touch()
    np.zeros(100, np.uint16).tofile(tmp_path / "corpus" / "train.bin")

    def head(mlp: int) -> Path:
        return export.export_heads(
            HEAD, tmp_path, weights_folder(), HeadShape(mlp=mlp),
            minutes=1, written_tokens=50_000, seed=0, threads=1, start=None,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        head(64)
    tokenizer = tmp_path / "corpus" / "tokenizer.json"
    assert tokenizer.read_bytes() == (weights_folder() / "target" / "tokenizer.json").read_bytes()
    with pytest.raises(PairError, match="mlp was 64, is 32"):
        head(32)
    files = {file.name for file in head(64).iterdir()}
    assert files == {file.name for file in (weights_folder() / HEAD).iterdir()}, "nothing of the run"
    with pytest.raises(PairError, match="finished"):
        head(64)
    assert [shape.mlp for shape in trained] == [64, 64]


@pytest.mark.parametrize(
    ("command", "why"),
    [("extend", "no draft"), ("train-head", "takes 800 MLP columns from its target, which has 768")],
)
def test_a_wrong_pair_is_refused_before_the_corpus_is_made(command: str, why: str, tmp_path: Path) -> None:
    words = ["pair", command, "--pair", str(tmp_path / "none"), "--work", str(tmp_path / "work")]
    got = CliRunner().invoke(app, words)
    assert got.exit_code == 2 and "no target" in got.output
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "target").symlink_to(weights_folder() / "target")
    got = CliRunner().invoke(app, [*words, "--mlp", "800"] if command == "train-head" else words)
    assert got.exit_code == 2 and why in got.output
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("command", ["extend", "train-head"])
def test_a_pair_of_somebody_elses_is_looked_at_before_the_corpus_is_made(
    command: str, tmp_path: Path
) -> None:
    """Ids would be cut to 16 bits, and a missing tokenizer found once the text had been downloaded."""
    pair = shutil.copytree(weights_folder(), tmp_path / "pair")
    words = ["pair", command, "--pair", str(pair), "--work", str(tmp_path / "work")]
    config = pair / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 128_256}))
    got = CliRunner().invoke(app, words)
    assert got.exit_code == 2 and "a vocabulary of 128256 tokens cannot be trained here" in got.output
    shutil.copy(weights_folder() / "target" / "config.json", config)
    (pair / "target" / "tokenizer.json").unlink()
    got = CliRunner().invoke(app, words)
    assert got.exit_code == 2 and "has no tokenizer.json" in got.output
    assert not (tmp_path / "work").exists()


def test_a_head_to_go_on_from_is_looked_at_before_the_corpus_is_made(tmp_path: Path) -> None:
    """It would be missed, or found too small, once the target has written its text."""
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "target").symlink_to(weights_folder() / "target")
    go_on = ["pair", "train-head", "--go-on", "--work", str(tmp_path / "work")]
    for more, why in (
        (["--kv-heads", "2"], "has 1 KV heads, and training adds none: give --kv-heads 1 or fewer"),
        (["--pair", str(tmp_path / "pair")], "holds no eagle3 to go on from"),
        (["--pair", str(tmp_path / "pair"), "--kind", "medusa"], "holds no medusa to go on from"),
    ):
        got = CliRunner().invoke(app, go_on + more)
        assert got.exit_code == 2 and why in got.output
    assert not (tmp_path / "work").exists()


def test_what_was_trained_is_measured_where_it_was_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --pair the shipped pair would be measured, and its acceptance.json written anew."""
    pair = tmp_path / ("a long name " * 9)
    pair.mkdir()
    (pair / "target").symlink_to(weights_folder() / "target")
    monkeypatch.setattr(export, "export_heads", lambda *_, **__: tmp_path / "head")
    got = CliRunner().invoke(app, ["pair", "train-head", "--kind", "medusa", "--pair", str(pair)])
    assert got.exit_code == 0, got.output
    assert f"copy it to {pair / 'medusa'}, then" in got.output
    assert f"`adaserve pair eval --pair {pair} --only medusa --calibrate`" in got.output
    monkeypatch.setattr("adaserve.pair.packed.average", lambda *_: None)
    got = CliRunner().invoke(app, ["pair", "average", "new", "old", str(tmp_path / "out")])
    assert got.exit_code == 0, got.output
    assert "copy it to FOLDER/draft" in got.output
    assert "`adaserve pair eval --pair FOLDER --calibrate`" in got.output


def test_heads_have_no_table_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured after short texts alone. The columns of that table can be told apart."""
    row = {
        "category": "summarization", "temperature": 0.7, "distinct_8_grams": 0.9, "top_1_agrees": 0.7,
        "accepted_w1": 1.1, "accepted_w2": 1.2, "accepted_w3": 1.3, "accepted_w3_without_noise": 1.05,
    }  # fmt: skip
    report: dict[str, Any] = {"acceptance": [row], "contexts": [], "draft_temperature": {}, "reliability": {}}
    monkeypatch.setattr("adaserve.pair.evaluate.evaluate", lambda *_, **__: report)
    got = CliRunner().invoke(app, ["pair", "eval", "--only", "eagle3"])
    assert got.exit_code == 0 and "Trees of depth 4" in got.output, got.output
    assert "long texts" not in got.output
    assert "w=1" in got.output and "…" not in got.output, got.output

"""What learns starts from the weights that are served, whatever revision of a hub's model that is."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.checkpoints.fingerprint import local_folder
from adaserve.config import AdaServeConfig
from adaserve.engine import worker
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.draft_model import DraftModel


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two revisions of lab/draft, as the Hugging Face hub's cache has them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, made = tmp_path / "models--lab--draft", {}
    (folder / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("tuned", "b" * 40)):
        (folder / "refs" / name).write_text(commit)
        made[name] = folder / "snapshots" / commit
        made[name].mkdir(parents=True)
        (made[name] / "config.json").write_text("{}")
        (made[name] / "model.safetensors").write_bytes(name.encode())
    return made


def test_a_model_is_found_in_the_revision_that_is_served(snapshots: dict[str, Path]) -> None:
    assert local_folder("lab/draft") == str(snapshots["main"])
    assert local_folder("lab/draft", "tuned") == str(snapshots["tuned"])
    assert local_folder("lab/other") == "lab/other"
    (snapshots["tuned"] / "model.safetensors").unlink()  # SGLang has them elsewhere: --download-dir
    assert local_folder("lab/draft", "tuned") == "lab/draft"


def test_a_folder_is_the_same_wherever_it_is_asked_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    kept = local_folder("draft")
    os.chdir("/")
    assert kept == local_folder(kept) == str(tmp_path / "draft")


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_trainer_is_given_what_is_served(
    kind: Any, snapshots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(worker, "Learner", lambda *what: given.extend(what))
    served: Any = worker.AdaServeWorker.__new__(worker.AdaServeWorker)
    config = SimpleNamespace(revision="tuned")
    runner = SimpleNamespace(model_config=config, model=torch.nn.Linear(1, 1))
    draft = DraftModel("lab/draft", SimpleNamespace(model_runner=runner), None, kind)  # type: ignore[arg-type]
    served.config, served.ledger = AdaServeConfig(learn=True), SimpleNamespace(stats=None)
    served._server_args = SimpleNamespace(model_path="lab/draft", revision="tuned")
    served._draft_worker = SimpleNamespace(models=[draft])
    target = SimpleNamespace(model_config=SimpleNamespace(vocab_size=7))
    served._target_worker = SimpleNamespace(model_runner=target)
    served._make_learner([BeamSource.__new__(BeamSource)], None)
    folder = str(snapshots["tuned"])
    assert (given[4], *given[6:]) == (folder, 7, None if kind == "model" else folder)

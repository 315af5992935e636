"""A head is told from a model by its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaserve.checkpoints.draft_kind import (
    EAGLE3,
    HEADS,
    draft_kind,
    medusa_folder,
    medusa_heads,
    require_known_head,
)
from adaserve.errors import UnsupportedError


@pytest.mark.parametrize(
    ("architectures", "stated", "kind"),
    [
        ([EAGLE3], "auto", "eagle3"),
        ([EAGLE3], "eagle3", "eagle3"),
        (["MiMoMTP"], "auto", "mtp"),
        (["MiMoForCausalLM"], "mtp", "mtp"),
        (["LlamaForCausalLM"], "auto", "model"),
        (["Qwen3ForCausalLM"], "model", "model"),
        (None, "auto", "model"),
    ],
)
def test_kinds(architectures: list[str] | None, stated: str, kind: str) -> None:
    assert draft_kind(architectures, stated, "draft") == kind


@pytest.mark.parametrize(("architecture", "stated"), [(EAGLE3, "model"), ("LlamaForCausalLM", "eagle3")])
def test_another_kind_than_stated_is_refused(architecture: str, stated: str) -> None:
    with pytest.raises(ValueError, match=rf"{stated}.*{architecture}.*folder/x.*--draft-kind auto"):
        draft_kind([architecture], stated, "folder/x")


@pytest.mark.parametrize(
    "name", ["Qwen3MoeForCausalLMMTP", "Glm4MoeForCausalLMNextN", "LlamaForCausalLMEagle", "DFlashDraftModel"]
)
def test_a_head_that_is_not_served_is_refused(name: str) -> None:
    """SGLang takes an MTP layer out of a draft model with experts, and its forward would fail."""
    with pytest.raises(ValueError, match=rf"folder/x as {name}, .*--drafts suffix"):
        require_known_head([name], "folder/x")
    for served in ([*HEADS], ["LlamaForCausalLM"], None):
        require_known_head(served, "folder/x")


def folder_with(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_medusa_heads_are_told_by_their_count(tmp_path: Path) -> None:
    """They name neither an architecture nor a model type."""
    path = folder_with(tmp_path, {"medusa_num_heads": 4, "medusa_num_layers": 1})
    assert medusa_folder(path, "auto") == medusa_folder(path, "medusa") == tmp_path
    assert medusa_heads(tmp_path) == 4
    with pytest.raises(
        ValueError, match=r"eagle3.*medusa_num_heads 4.*of the kind medusa.*--draft-kind auto"
    ):
        medusa_folder(path, "eagle3")
    folder_with(tmp_path, {"medusa_num_heads": "many"})
    with pytest.raises(ValueError, match="is many: it must be 1 or more"):
        medusa_heads(tmp_path)


@pytest.mark.parametrize("path", [None, "lab/model", "a folder"])
def test_what_is_no_folder_of_medusa_heads(path: str | None, tmp_path: Path) -> None:
    if path == "a folder":
        path = folder_with(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert medusa_folder(path, "auto") is None
    with pytest.raises(ValueError, match="give --draft-model-path such a folder"):
        medusa_folder(path, "medusa")


@pytest.mark.parametrize("data", [b"", b'{"architectures": [', b"\xff\xfe", b"[]"])
def test_a_configuration_that_cannot_be_read_is_named(data: bytes, tmp_path: Path) -> None:
    """A download that broke off."""
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(UnsupportedError, match=rf"{tmp_path}/config\.json .*download that model once more"):
        medusa_folder(str(tmp_path), "auto")

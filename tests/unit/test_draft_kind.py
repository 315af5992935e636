"""A head is told from a model by its configuration."""

from __future__ import annotations

import pytest

from adaserve.draft_kind import EAGLE3, draft_kind


@pytest.mark.parametrize(
    ("architectures", "stated", "kind"),
    [
        ([EAGLE3], "auto", "eagle3"),
        ([EAGLE3], "eagle3", "eagle3"),
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

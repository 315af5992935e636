"""What kind of draft a checkpoint is: a language model, or a head on the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

DraftKind = Literal["model", "eagle3"]

EAGLE3 = "LlamaForCausalLMEagle3"
"""SGLang's class of an EAGLE-3 head, as ``config.json`` names it."""


def draft_kind(architectures: Sequence[str] | None, stated: str, path: str) -> DraftKind:
    """By the ``architectures`` of the draft's ``config.json``. ``stated``: the setting ``draft_kind``.

    Raises ValueError where the two disagree.
    """
    found: DraftKind = "eagle3" if EAGLE3 in (architectures or ()) else "model"
    if stated not in ("auto", found):
        names = ", ".join(architectures or ["no architectures"])
        raise ValueError(
            f"draft_kind is {stated}, but by its config.json ({names}) the draft {path} is of the kind "
            f"{found}: use --draft-kind auto, or give the draft that you mean"
        )
    return found


def kind_at(path: str, revision: str | None = None) -> DraftKind:
    """Of the checkpoint at ``path``, a folder or a name on a model hub."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    return draft_kind(config.get("architectures"), "auto", path)

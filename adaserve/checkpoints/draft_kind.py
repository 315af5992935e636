"""What kind of draft a checkpoint is: a language model, or a head that reads the target's hidden states."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from adaserve.errors import UnsupportedError

DraftKind = Literal["model", "eagle3", "mtp", "medusa"]

EAGLE3 = "LlamaForCausalLMEagle3"
"""SGLang's class of an EAGLE-3 head, as ``config.json`` names it."""

MTP = "MiMoMTP"
"""SGLang's class of an MTP layer, which is in the checkpoint of a target of the class ``MTP_TARGET``."""

MTP_TARGET = "MiMoForCausalLM"

HEADS = (EAGLE3, MTP)
"""SGLang's classes of what reads hidden states."""

_ANY_HEAD = re.compile(r"eagle|nextn|mtp|dspark|dflash", re.IGNORECASE)
"""In names of SGLang's classes that read hidden states."""

MEDUSA_HEADS = "medusa_num_heads"
"""What only the ``config.json`` of Medusa heads has; it names neither an architecture nor a model type."""


def draft_kind(architectures: Sequence[str] | None, stated: str, path: str) -> DraftKind:
    """Of a draft that SGLang loads, by the ``architectures`` of its ``config.json``. ``stated``: the setting
    ``draft_kind``.

    Raises UnsupportedError where the two disagree.
    """
    names = architectures or ()
    found: DraftKind = "model"
    if EAGLE3 in names:
        found = "eagle3"
    elif MTP in names or MTP_TARGET in names:  # SGLang takes the MTP layer out of such a draft
        found = "mtp"
    _require(found, stated, path, ", ".join(architectures or ["no architectures"]))
    return found


def require_known_head(architectures: Sequence[str] | None, path: str) -> None:
    """``architectures``: those that SGLang is about to load. Of many models, such as Qwen 3 with experts, it
    takes an MTP layer where it loads a draft, whether the checkpoint has one or not.

    Raises UnsupportedError for a head of another kind than those that are served.
    """
    for name in architectures or ():
        if _ANY_HEAD.search(name) and name not in HEADS:
            raise UnsupportedError(
                f"SGLang would load the draft {path} as {name}, a head that is not supported: give another "
                "draft, or serve without one (--drafts suffix)"
            )


def kind_at(path: str, revision: str | None = None, stated: str = "auto") -> DraftKind:
    """Of the checkpoint at ``path``, a folder or a name on a model hub. Raises UnsupportedError where another
    one was ``stated``."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    if MEDUSA_HEADS in config:
        return "medusa"
    return draft_kind(config.get("architectures"), stated, path)


def other_size(draft: str, size: int, target: int) -> str:
    """Why a draft with a vocabulary of that ``size`` cannot be served."""
    return (
        f"the draft {draft} has a vocabulary of {size} tokens and the target one of {target}: "
        "choose a draft of the same family with the same tokenizer"
    )


def medusa_folder(path: str | None, stated: str) -> Path | None:
    """The draft's folder if it holds Medusa heads, which are hidden from SGLang because it does not know
    them. Raises UnsupportedError if another kind was stated, or if Medusa heads were stated and are not
    there.
    """
    folder = None if path is None else Path(path)
    if folder is not None and MEDUSA_HEADS in (config := read_config(folder)):
        _require("medusa", stated, str(path), f"{MEDUSA_HEADS} {config[MEDUSA_HEADS]}")
        return folder
    if stated == "medusa":
        raise UnsupportedError(
            f"draft_kind is medusa, and {path or 'no draft'} is not a folder of this host whose config.json "
            f"has {MEDUSA_HEADS}: give --draft-model-path such a folder"
        )
    return None


def medusa_heads(folder: Path) -> int:
    """How many heads there are in a ``medusa_folder``. Raises UnsupportedError."""
    count = read_config(folder)[MEDUSA_HEADS]
    if not isinstance(count, int) or count < 1:
        raise UnsupportedError(f"{MEDUSA_HEADS} in {folder / 'config.json'} is {count}: it must be 1 or more")
    return count


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json``; empty where there is none on this host. Raises UnsupportedError for one
    that is damaged."""
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path} cannot be read ({error}): download that model once more") from error
    if not isinstance(config, dict):
        raise UnsupportedError(f"{path} holds no object: download that model once more")
    return config


def _require(found: DraftKind, stated: str, path: str, reason: str) -> None:
    if stated not in ("auto", found):
        raise UnsupportedError(
            f"draft_kind is {stated}, but by its config.json ({reason}) the draft {path} is of the kind "
            f"{found}: use --draft-kind auto, or give the draft that you mean"
        )

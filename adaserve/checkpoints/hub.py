"""Whether a model exists: as a folder of this host, or by name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from adaserve.errors import why_no_answer

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Of a model that is not a folder here."""

_CONFIGS = ("config.json", "params.json")  # of Hugging Face and of Mistral
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")  # a file of GGUF is a model
_PATIENCE_S = 10.0
_OTHER_HUB = "SGLANG_USE_MODELSCOPE"


def why_no_model(path: str) -> str | None:
    """Why ``path`` is no model; None where it is one, or may be a name on a hub."""
    folder = Path(path)
    if folder.is_dir():
        known = any((folder / name).is_file() for name in _CONFIGS)
        return None if known else f"{path} holds no config.json: give the folder of a model"
    if folder.is_file() and folder.suffix in _WEIGHTS:
        return f"{path} is a file of weights: give the folder of the model"
    if folder.exists() or "/" not in path or "://" in path or HUB_NAME.fullmatch(path):
        return None
    return f"there is no model at {path}: give a folder or a Hugging Face name"


def why_not_on_hub(name: str) -> str | None:
    """Why SGLang could not download a model; None where it need not, or can. SGLang itself says so in a
    traceback, and after more than a minute where the hub cannot be reached."""
    if Path(name).exists() or "://" in name or os.environ.get(_OTHER_HUB) or _was_downloaded(name):
        return None
    import httpx
    from huggingface_hub import model_info
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        model_info(name, timeout=_PATIENCE_S)
    except (RepositoryNotFoundError, HFValidationError):
        return (
            f"there is no model {name}, neither a folder here nor on the Hugging Face hub; if it is private "
            "there, set HF_TOKEN"
        )
    except OfflineModeIsEnabled:
        return f"there is no folder {name} nor a download of it, and HF_HUB_OFFLINE forbids downloading it"
    except httpx.TransportError as error:
        return (
            f"there is no folder {name}, and the Hugging Face hub cannot be reached to look for it there: "
            f"{why_no_answer(error)}"
        )
    except (HfHubHTTPError, ValueError):
        pass  # a busy hub, or not the hub: SGLang asks again
    return None


def _was_downloaded(name: str) -> bool:
    """In whatever version."""
    from huggingface_hub.constants import HF_HUB_CACHE

    versions = Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").glob("*")
    return any((version / config).exists() for version in versions for config in _CONFIGS)

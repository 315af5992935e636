"""Images, audio and video that cannot be read are answered with 400.

Why: if a file is missing or an image too large, SGLang answers 500, as if the server were at fault. If a
prompt has more image placeholders than images, Transformers raises StopIteration in a worker thread. No
future can hold that exception, so the client waits forever. SGLang pins the frames of a video for a GPU
unless it takes the host for one of its own CPU build, so on our CPU platform every video is a 500.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.host.device import on_cpu
from adaserve.patches import hook


def register() -> None:
    processor = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
    hook(f"{processor}.load_mm_data", _load, HookType.AROUND)
    hook(f"{processor}.process_and_combine_mm_data", _combine, HookType.AROUND)


async def _load(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    if any(kwargs.get("video_data") or ()) and on_cpu():
        raise RequestError("video_data is refused: it needs a host with a GPU")
    try:
        return await original(*args, **kwargs)
    except RuntimeError as error:
        raise RequestError(f"image_data, video_data or audio_data cannot be read: {error}") from error


def _combine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs in a worker thread."""
    try:
        return original(*args, **kwargs)
    except StopIteration as error:
        raise RequestError(
            "the prompt must have one placeholder for each image, audio or video sent with it, got more"
        ) from error

"""Custom logit processors, one request at a time: one that fails ends its own request.

Why: a processor is code of a client's. SGLang hands it the rows of all requests that sent the same code at
once. What it raises would leave the scheduler's loop, and so would what an answer of another shape raises: in
SGLang's sampler, which draws the first token, and in the worker, which draws the others.

SGLang also keeps every processor that it has ever read, in each of its processes. Code that is made for one
request, with the request's own values inside, would fill the memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from adaserve.patches import hook

logger = logging.getLogger("adaserve")

REQUEST = "__req__"
"""Under this name SGLang adds the request to the ``custom_params`` that a processor is given."""

MAX_KEPT = 64
"""Processors that were read and are kept, besides those of running requests."""


def register() -> None:
    from sglang.srt.sampling.custom_logit_processor import _cache_from_str

    hook("sglang.srt.layers.sampler.apply_custom_logit_processor", _in_prefills, HookType.AROUND)
    read = "sglang.srt.sampling.custom_logit_processor._cache_from_str"
    hook(read, keeping_few(_cache_from_str), HookType.REPLACE)


def keeping_few(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The function under SGLang's cache, which has no limit, with one that has."""
    return lru_cache(MAX_KEPT)(inspect.unwrap(read))


def _in_prefills(_: Callable[..., None], logits: Tensor, info: Any, *__: Any, **___: Any) -> None:
    apply_processors(logits, info)


def apply_processors(logits: Tensor, info: Any) -> None:
    """Changes ``logits`` [n, vocab] in place. ``info``: SGLang's SamplingBatchInfo of the n requests.

    A row whose processor raises, or returns something that no token can be drawn from, stays as it was. Its
    request ends with 400 at the end of the iteration.
    """
    for entry in info.custom_logit_processor.values():
        for row in entry.rows:
            _apply(entry.processor, logits[row : row + 1], info.custom_params[row])


def _apply(processor: Any, logits: Tensor, params: dict[str, Any]) -> None:
    try:
        result = processor(logits.clone(), [params])
        if result.shape != logits.shape:
            raise ValueError(f"it returned {list(result.shape)} logits for {list(logits.shape)}")
        if not result.max().isfinite():
            raise ValueError("it returned logits that no token can be drawn from")
    except Exception as error:
        logger.warning("AdaServe: a custom logit processor failed: %r", error)
        _end(params[REQUEST], error)
    else:
        logits.copy_(result)


def _end(req: Any, error: Exception) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.to_finish is None:
        req.to_finish = FINISH_ABORT(
            f"the custom logit processor of this request failed: {error!r}",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )

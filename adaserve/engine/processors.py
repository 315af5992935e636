"""Custom logit processors, one request at a time: one that fails ends its own request.

A processor is code of a client's. SGLang hands it the rows of all requests that sent the same code at once.
What it raises would leave the scheduler's loop, and so would what an answer of another shape raises.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from torch import Tensor

logger = logging.getLogger("adaserve")

REQUEST = "__req__"
"""Under this name SGLang adds the request to the ``custom_params`` that a processor is given."""


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
        logger.warning("adaserve: a custom logit processor failed: %r", error)
        _end(params[REQUEST], error)
    else:
        logits.copy_(result)


def _end(req: Any, error: Exception) -> None:
    if req.to_finish is None:
        req.to_finish = FINISH_ABORT(
            f"the custom logit processor of this request failed: {error!r}",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )

"""A request is ended whose grammar takes so long that the others would wait for it.

The boundary refuses what is known to be slow (``adaserve/boundary/ambiguity.py``). What a recursive grammar
such as ``s ::= s s | [a-z]`` costs shows only as its text gets longer: by then a token takes seconds of the
loop that serves everybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

PATIENCE_S = 0.5
"""Of this thread's own time, so that a busy host ends nobody's request."""


@contextmanager
def limited_time(req: Any) -> Iterator[None]:
    """Ends ``req`` (SGLang's) at the end of the iteration if what is done meanwhile takes too long.

    Not under tensor parallelism: ranks must end the same requests, and each has its own time.
    """
    start_s = time.thread_time()
    yield
    taken_s = time.thread_time() - start_s
    if taken_s > PATIENCE_S and req.to_finish is None and get_parallel().tp_size == 1:
        req.to_finish = FINISH_ABORT(
            f"the grammar was given up: one step of it took {taken_s:.1f} s. It matches the text so far in "
            "too many ways; write it without rules that repeat themselves on both sides, such as s ::= s s",
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
        )

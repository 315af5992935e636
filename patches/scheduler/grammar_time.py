"""A request is ended whose grammar takes so long that the others would wait for it.

Why: a matcher that takes seconds for a token stops everybody's iteration. The boundary refuses what is known
to be slow (``adaserve/boundary/ambiguity.py``). What a recursive grammar such as ``s ::= s s | [a-z]`` costs
shows only as its text gets longer. So a grammar's steps are timed, both where SGLang takes them and where the
worker does (``adaserve/engine/grammar.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

USUAL_S = 0.02
"""Of a step, that others do not notice much."""

PATIENCE_S = 0.5
"""What the steps of a request may take beyond that: one of them, or many together. Of this thread's own time,
so that a busy host ends nobody's request."""

_BEYOND = "_adaserve_grammar_beyond_s"
"""Where SGLang's request keeps what its steps took beyond the usual."""


def register() -> None:
    processor = (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    )
    hook(f"{processor}._accept_grammar_tokens", _accept, HookType.AROUND)


def _accept(original: Callable[..., list[int]], self: Any, req: Any, tokens: Any) -> list[int]:
    with timed(req):
        return original(self, req, tokens)


@contextmanager
def timed(req: Any) -> Iterator[None]:
    """Counts what is done meanwhile as a step of the grammar of ``req`` (SGLang's)."""
    start_s = time.thread_time()
    yield
    taken_s = time.thread_time() - start_s
    setattr(req, _BEYOND, max(0.0, getattr(req, _BEYOND, 0.0) + taken_s - USUAL_S))


def end_slow(reqs: Sequence[Any], decide: Callable[[Callable[[], list[int]]], list[int]]) -> None:
    """Ends those of ``reqs`` whose grammars have taken too long, at the end of the iteration.

    ``decide`` (``RankSync.decide``): each rank has its own times, and all must end the same requests.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    def slow() -> list[int]:
        return [i for i, req in enumerate(reqs) if getattr(req, _BEYOND, 0.0) > PATIENCE_S]

    for i in decide(slow):
        if reqs[i].to_finish is None:
            reqs[i].to_finish = FINISH_ABORT(
                f"the grammar was given up: its steps took {getattr(reqs[i], _BEYOND, 0.0):.2f} s too long. "
                "It matches the text so far in too many ways; write it without rules that repeat themselves "
                "on both sides, such as s ::= s s",
                HTTPStatus.BAD_REQUEST,
                "BadRequestError",
            )

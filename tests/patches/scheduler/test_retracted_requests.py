"""What becomes of requests whose answers have begun and that wait again, as SGLang took back their KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from adaserve.patches.scheduler.retracted_requests import _ended, _refused


class Begun(SimpleNamespace):
    """One of SGLang's requests with three tokens, while it waits."""

    def __init__(self, **changes: Any) -> None:
        fields = {"rid": "a", "output_ids": [7, 8, 9], "finished_reason": None, "return_logprob": False}
        super().__init__(**(fields | {"to_finish": FINISH_ABORT("at the next token")} | changes))


class Scheduler:
    """SGLang's, which tells of an end either through its output stream or past it."""

    def __init__(self) -> None:
        self.told, self.left = list[str](), list[tuple[str, bool]]()
        self.output_streamer = SimpleNamespace(stream_output=lambda *_: self.told.append("stream"))
        early = lambda rid, holds_row: self.left.append((rid, holds_row))  # noqa: E731
        self.draft_worker = SimpleNamespace(ended_early=early)

    def tell_the_http_process(self, scheduler: Any, abort_req: Any, req: Any) -> None:
        self.told.append("abort")


@pytest.mark.parametrize(("retractions", "refused"), [(0, True), (1, False)])
def test_an_answer_that_has_begun_is_not_turned_away(retractions: int, refused: bool) -> None:
    """The queue is full."""
    request = SimpleNamespace(retraction_count=retractions)
    assert _refused(lambda *_: True, None, request) is refused
    assert not _refused(lambda *_: False, None, request)


@pytest.mark.parametrize(
    ("said", "status"), [(None, None), ({"type": "abort", "status_code": 500, "message": "no memory"}, 500)]
)
def test_an_answer_that_has_begun_ends_where_those_do_that_run(said: Any, status: int | None) -> None:
    """Behind its tokens, so that the detokenizer forgets it; and the books learn why."""
    request = Begun()
    scheduler = Scheduler()
    _ended(scheduler.tell_the_http_process, scheduler, AbortReq(rid="a", finished_reason=said), request)
    assert scheduler.told == ["stream"] and scheduler.left == [("a", False)]
    assert isinstance(request.finished_reason, FINISH_ABORT) and request.to_finish is None
    assert request.finished_reason.status_code == status
    assert request.finished_reason.message == ("Aborted" if said is None else "no memory")


def test_what_was_said_before_of_its_end_stays() -> None:
    """A prompt in parts that is read once more is marked as ended before anybody is told."""
    request, scheduler = Begun(finished_reason=FINISH_ABORT("the mask is too small", 400)), Scheduler()
    _ended(scheduler.tell_the_http_process, scheduler, AbortReq(rid="a"), request)
    assert scheduler.told == ["stream"] and request.finished_reason.status_code == 400


@pytest.mark.parametrize("request_", [Begun(output_ids=[]), SimpleNamespace(rid="a")])
def test_of_all_others_the_http_process_is_told(request_: Any) -> None:
    """Of those without a token, and of one that was never taken in."""
    scheduler = Scheduler()
    _ended(scheduler.tell_the_http_process, scheduler, AbortReq(rid="a"), request_)
    assert scheduler.told == ["abort"] and not scheduler.left
    assert getattr(request_, "finished_reason", None) is None

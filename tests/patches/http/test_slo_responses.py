"""What a client is told of its SLO where a request has several answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

from adaserve.patches.http import slo_responses
from adaserve.patches.http.slo_responses import KEY, of_all

MET = {"class": "chat", "tpot_ms": 10.0, "tpot_slo_ms": 20.0, "met": True}
MISSED = {"class": "chat", "tpot_ms": 30.0, "tpot_slo_ms": 20.0, "met": False}
LATE = {"class": "chat", "tpot_ms": 5.0, "tpot_slo_ms": 20.0, "ttft_ms": 900.0, "met": False}
ONE_TOKEN = {"class": "chat", "tpot_ms": None, "tpot_slo_ms": 20.0, "met": True}


def carried(report: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """An output as it comes from the scheduler."""
    return {"meta_info": {"id": "r", KEY: [] if report is None else [report]}, **more}


async def outputs(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def watched(*items: Any) -> list[Any]:
    async def collected() -> list[Any]:
        return [out async for out in slo_responses._remember(outputs(*items), None, None)]

    return asyncio.run(collected())


def whole(*reports: dict[str, Any] | None) -> dict[str, Any]:
    """The metadata of a response that is not streamed."""
    (ret,) = watched([carried(r) for r in reports])
    response = SimpleNamespace(metadata={"weight_version": "default"})
    slo_responses._whole(response, None, None, ret, 0)
    return response.metadata


def streamed(*reports: dict[str, Any] | None, order: list[int] | None = None) -> dict[str, Any]:
    """The last event of a stream whose answers end in this ``order``."""
    starts = [carried(None, index=i) for i in range(len(reports))]
    ends = [carried(reports[i], index=i) for i in order or range(len(reports))]
    usage = {"choices": [], "usage": {"completion_tokens": 3}}

    async def events(*_: Any) -> AsyncIterator[str]:
        async for _ in slo_responses._remember(outputs(*starts, *ends), None, None):
            pass
        yield "data: " + json.dumps(usage, separators=(",", ":")) + "\n\n"
        yield "data: [DONE]\n\n"

    async def collected() -> list[str]:
        return [event async for event in slo_responses._stream(events, None, None, None, None)]

    last, done = asyncio.run(collected())
    assert done == "data: [DONE]\n\n"
    told = json.loads(last.removeprefix("data: "))
    assert usage.items() <= told.items()
    return told


@pytest.mark.parametrize("report", [MET, MISSED])
def test_the_report_of_one_answer_is_as_it_is(report: dict[str, Any]) -> None:
    assert whole(report) == {"weight_version": "default", KEY: report}
    assert streamed(report)["metadata"] == {KEY: report}


@pytest.mark.parametrize(
    ("reports", "met", "tpot_ms"),
    [
        ([MET, MISSED], False, 30.0),
        ([MISSED, MET], False, 30.0),
        ([MET, LATE], False, 5.0),
        ([LATE, MISSED, MET], False, 30.0),
        ([MET, MET], True, 10.0),
        ([ONE_TOKEN, MET], True, 10.0),
        ([MET, None], False, 10.0),
    ],
)
def test_several_answers_met_it_if_all_did(
    reports: list[dict[str, Any] | None], met: bool, tpot_ms: float
) -> None:
    """Streaming and not, whichever ends last. What else is told explains a miss."""
    backwards = [*range(len(reports))][::-1]
    for told in (
        whole(*reports)[KEY],
        streamed(*reports)["metadata"][KEY],
        streamed(*reports, order=backwards)["metadata"][KEY],
    ):
        assert (told["met"], told["tpot_ms"], told["class"]) == (met, tpot_ms, "chat")
        assert told["answers"] == reports, "in the order of the choices"


def test_each_answer_of_a_batch_keeps_its_own() -> None:
    """As /generate shows them."""
    (ret,) = watched([carried(MET), carried(MISSED)])
    assert [one["meta_info"][KEY] for one in ret] == [MET, MISSED]


def test_nothing_is_said_of_answers_that_did_not_finish() -> None:
    assert whole(None) == whole(None, None) == {"weight_version": "default"} and of_all([]) is None


def test_an_error_in_place_of_a_response_stays_as_it_is() -> None:
    (ret,) = watched([carried(MET)])
    error = SimpleNamespace(status_code=400)
    slo_responses._whole(error, None, None, ret, 0)
    assert vars(error) == {"status_code": 400}


def test_a_stream_of_what_is_new_ends_with_the_report() -> None:
    """Of its lists SGLang leaves out as many entries as tokens were sent before, and there is one report."""
    gathered: list[Any] = []  # by SGLang, for all outputs of an answer
    sent = []
    for offset, report in ((0, None), (2, None), (5, MET)):
        gathered.extend([] if report is None else [report])
        meta = {"output_token_logprobs": list(range(6)), KEY: gathered}
        slo_responses._keep_whole(_slice_streaming_output_meta_info, meta, offset, [KEY])
        sent.append({"meta_info": meta})
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in sent] == [6, 4, 1]
    assert [one["meta_info"].get(KEY) for one in watched(*sent)] == [None, None, MET]

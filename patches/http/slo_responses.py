"""Every finished response carries its TPOT, its SLO and whether it was met; the scheduler counts them.

Why: SGLang's output carries fields of its own choice. The streamer class is its documented place
for more; ``/generate`` then shows them in ``meta_info``. The OpenAI routes drop ``meta_info``, so they get
the same object as ``metadata.slo``: in the response, or in the last event of a stream (of completions and
chat, if it has usage). ``/v1/responses`` gets it as JSON text: the metadata of that API are texts, and typed
clients fail on anything else. Of several answers they get one report, which holds each one's own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import worker_of

KEY = "slo"

Report = dict[str, Any]
"""Of one answer, as ``SLOLedger.close`` makes it."""

_reports: ContextVar[dict[int, Report | None]] = ContextVar("_reports")
"""Of the answers to the request that this task serves, by index."""


def register() -> None:
    hook("sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class", _streamer_class, HookType.AFTER)
    manager = "sglang.srt.managers.tokenizer_manager"
    hook(f"{manager}.TokenizerManager.generate_request", _remember, HookType.AFTER)
    hook(f"{manager}._slice_streaming_output_meta_info", _keep_whole, HookType.AROUND)
    openai = "sglang.srt.entrypoints.openai"
    completions = f"{openai}.serving_completions.OpenAIServingCompletion"
    chat = f"{openai}.serving_chat.OpenAIServingChat"
    responses = f"{openai}.serving_responses.OpenAIServingResponses"
    hook(f"{responses}._build_response", _response, HookType.AFTER)
    for whole, stream in (
        (f"{completions}._build_completion_response", f"{completions}._generate_completion_stream"),
        (f"{chat}._build_chat_response", f"{chat}._generate_chat_stream"),
    ):
        hook(whole, _whole, HookType.AFTER)
        hook(stream, _stream, HookType.AROUND)


def _streamer_class(base: type, scheduler: Any) -> type:
    class SLOOutputStreamer(base):  # type: ignore[misc]
        """Adds the SLO report to the output of finished requests."""

        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            ledger = worker_of(scheduler).ledger
            pool = scheduler.pool_stats_observer.get_pool_stats()
            ledger.load(len(scheduler.waiting_queue), pool.get_max_pool_usage())
            return {KEY: [[ledger.close(r)] if r.finished() else [] for r in reqs]}

    return SLOOutputStreamer


def of_all(reports: Sequence[Report | None]) -> Report | None:
    """What is said of a request with these answers; None stands for one that did not finish.

    Of several answers: whether all met their SLOs, and each one's own report. The other fields are those of
    the slowest answer, of the answers that missed if there are any."""
    known = [report for report in reports if report]
    if len(reports) < 2 or not known:
        return known[0] if known else None
    worst = max(known, key=lambda report: (not report["met"], report["tpot_ms"] or 0.0))
    met = len(known) == len(reports) and all(report["met"] for report in known)
    return {**worst, "met": met, "answers": list(reports)}


def _keep_whole(original: Callable[..., None], meta_info: dict[str, Any], *rest: Any) -> None:
    """With ``--incremental-streaming-output`` SGLang takes what was sent before off each list of an output,
    and counts in tokens. The report is one for all of them."""
    carried = meta_info.pop(KEY, None)
    original(meta_info, *rest)
    if carried:
        meta_info[KEY] = [*carried]  # outputs that still wait hold the same list


def _remember(outputs: AsyncIterator[Any], self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Takes the report out of the list that SGLang carries it in, and keeps those of all answers where the
    OpenAI routes below find them."""
    reports: dict[int, Report | None] = {}
    _reports.set(reports)

    async def watched() -> AsyncIterator[Any]:
        async for out in outputs:
            for place, one in enumerate(out if isinstance(out, list) else [out]):
                if isinstance(one, dict):
                    carried = one["meta_info"].pop(KEY, None) or None
                    report = carried[0] if isinstance(carried, list) else carried
                    reports[one.get("index", place)] = report
                    if report is not None:
                        one["meta_info"][KEY] = report
            yield out

    return watched()


def _whole(response: Any, self: Any, request: Any, ret: list[dict[str, Any]], *_: Any) -> None:
    """``response``: completions or chat, or the error that was made of an answer that cannot be read."""
    report = of_all([answer["meta_info"].get(KEY) for answer in ret])
    if report is not None and isinstance(metadata := getattr(response, "metadata", None), dict):
        metadata[KEY] = report


def _response(response: Any, *_: Any, **__: Any) -> None:
    """``response``: the finished one of ``/v1/responses``, streaming or not."""
    if (report := _of_this_task()) is not None:
        response.metadata = {**response.metadata, KEY: json.dumps(report)}


def _of_this_task() -> Report | None:
    return of_all([report for _, report in sorted(_reports.get({}).items())])


async def _stream(
    original: Callable[..., AsyncIterator[str]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    async for event in original(self, adapted, request, raw_request):
        report = _of_this_task() if '"usage":{' in event else None
        yield event if report is None else _with_report(event, report)


def _with_report(event: str, report: Report) -> str:
    """Adds the report to the usage chunk (the one without choices); other chunks stay as they are."""
    prefix, _, data = event.partition("data: ")
    chunk = json.loads(data)
    if chunk.get("choices"):
        return event
    chunk["metadata"] = {KEY: report}
    return f"{prefix}data: {json.dumps(chunk)}\n\n"

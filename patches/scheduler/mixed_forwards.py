"""Prompts and running requests share a forward.

Why: a forward of SGLang has either prompts or requests that decode, if there is speculation (its
``--enable-mixed-chunk`` decodes one token of each request in a prefill, without drafts). So all running
requests stand still while a prompt is read, although a forward that verifies leaves compute unused.

Here SGLang makes a batch of prompts as usual. Before it runs, a decode iteration of the running requests
does, and its verification has the prompts in the same forward. Then SGLang runs the prompts, for which all is
computed but the first tokens. To SGLang these are two batches, one after the other. Both results come out of
one step of its loop, so they are processed together.

Under the overlap schedule SGLang's queue of results holds one per step, which is that of the prompts. Where
it is asked for the requests or the grammars of results that wait, those of the iteration beside are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import most_beside, worker_of

DECODED = "_adaserve_decoded"
"""Attribute of a prefill's result: the batch that decoded in the same forward, and its result."""


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}.run_batch", _run, HookType.AROUND)
    hook(f"{scheduler}.process_batch_result", _process, HookType.AROUND)
    hook(f"{scheduler}._reqs_finishing_inflight", _finishing, HookType.AROUND)
    hook(f"{scheduler}._advance_pending_grammar", _advance_grammars, HookType.AROUND)


def _run(original: Callable[..., Any], self: Any, batch: Any, *more: Any, **named: Any) -> Any:
    decoding = _decoding_beside(self, batch)
    if decoding is None:
        return original(self, batch, *more, **named)
    worker_of(self).read_beside(batch)
    decoded = original(self, decoding)
    shared = decoding.copy(), decoded
    with _in_one_record(self):
        result = original(self, batch, *more, **named)
    batch.launch_ts = decoding.launch_ts  # the prompts were read from there on, as SGLang's load reports say
    setattr(result, DECODED, shared)
    return result


def _process(original: Callable[..., None], self: Any, batch: Any, result: Any) -> None:
    if (shared := _decoded(result)) is not None:
        original(self, *shared)
    return original(self, batch, result)


def _finishing(original: Callable[..., list[Any]], self: Any, batch: Any) -> list[Any]:
    """Requests whose last token is in a result that waits: they do not decode again."""
    beside = {
        req for _, result in self.result_queue if (shared := _decoded(result)) for req in shared[0].reqs
    }
    more = [req for req in batch.reqs if req in beside and req.next_output_finishes_by_length()]
    return original(self, batch) + more


def _advance_grammars(original: Callable[..., None], self: Any) -> None:
    """By the tokens of all results that wait."""
    for _, result in self.result_queue:
        if (shared := _decoded(result)) is not None:
            decoding, decoded = shared
            self.batch_result_processor.advance_grammar_fsm(decoded, decoding)
    original(self)


def _decoded(result: Any) -> tuple[Any, Any] | None:
    shared: tuple[Any, Any] | None = getattr(result, DECODED, None)
    return shared


@contextmanager
def _in_one_record(scheduler: Any) -> Iterator[None]:
    """The batch that runs inside is recorded together with the last one. Under the overlap schedule SGLang
    keeps batches until the second one after them is launched, so that no tensor is freed that the device
    still reads. A step has one record."""
    if not scheduler.enable_overlap:
        yield
        return
    records, place = scheduler.batch_record_buf, scheduler.batch_record_ct
    decoding, scheduler.batch_record_ct = records[place], (place - 1) % len(records)
    yield
    records[scheduler.batch_record_ct].append(decoding)


def _decoding_beside(scheduler: Any, batch: Any) -> Any | None:
    """The running requests, ready to decode, if the prompts of ``batch`` can be in their forward."""
    running = scheduler.running_batch
    if running is batch or running.is_empty() or running.is_prefill_only or not _may_share(scheduler, batch):
        return None
    if not running.check_decode_mem():  # without the prompts' slots nobody has to be retracted
        return None
    decoding = scheduler.update_running_batch(running)
    return None if decoding is None or decoding.is_empty() else decoding


def _may_share(scheduler: Any, batch: Any) -> bool:
    """Whether the tokens of ``batch`` are all that its forward is given, and there is room for them."""
    most = most_beside(worker_of(scheduler))
    if not most or not batch.forward_mode.is_extend() or batch.prefill_input_ids_cpu is None:
        return False
    given = batch.input_embeds, batch.replace_embeds
    if any(x is not None for x in (*given, *(batch.multimodal_inputs or ()))):
        return False
    return 0 < batch.extend_num_tokens <= most

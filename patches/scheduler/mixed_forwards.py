"""Prompts and running requests share a forward.

Why: a forward of SGLang has either prompts or requests that decode, if there is speculation (its
``--enable-mixed-chunk`` decodes one token of each request in a prefill, without drafts). So all running
requests stand still while a prompt is read, although a forward that verifies leaves compute unused.

Here SGLang makes a batch of prompts as usual. Before it runs, a decode iteration of the running requests does,
and its verification has the prompts in the same forward. Then SGLang runs the prompts, for which all is
computed but the first tokens. To SGLang these are two batches, one after the other. Both results come out of
one step of its loop, so they are processed together.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _run(original: Callable[..., Any], self: Any, batch: Any, *more: Any, **named: Any) -> Any:
    decoding = _decoding_beside(self, batch)
    if decoding is None:
        return original(self, batch, *more, **named)
    worker_of(self).read_beside(batch)
    decoded = original(self, decoding)
    shared = decoding.copy(), decoded
    result = original(self, batch, *more, **named)
    setattr(result, DECODED, shared)
    return result


def _process(original: Callable[..., None], self: Any, batch: Any, result: Any) -> None:
    if (shared := getattr(result, DECODED, None)) is not None:
        original(self, *shared)
    return original(self, batch, result)


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

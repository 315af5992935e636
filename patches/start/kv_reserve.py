"""KV slots that one decode iteration may write, and what they leave of the pool for one request.

Why: SGLang reserves twice the largest tree per request and iteration to cover that lengths lag under
its overlap schedule. Our window is the root and the candidates; only under overlap a lag of two iterations
comes on top, of at most the deepest path and one token each: SGLang hears of one when the next has begun, and
that one's own successor may be drafted by then. The smaller reserve avoids retractions.

SGLang lets a request grow until it fills the KV pool, as if an iteration wrote one slot. There is then no
room for the window, and where nobody else is left to be retracted SGLang ends the request itself, with 500.
It also starts a prompt as soon as there is room for it and its answer. Where that answer is shorter than the
window, the request would be retracted right after its prefill, and its prompt read again and again.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

LONGEST_REQUEST, LONGEST_PROMPT = 4, 5
"""Places in what a worker of SGLang says about itself; in tokens."""


def register() -> None:
    sizing = "sglang.srt.mem_cache.allocation_sizing"
    hook(f"{sizing}.get_alloc_reserve_per_decode", lambda _: _window(), HookType.AROUND)
    hook(f"{sizing}.get_req_to_token_extra_context_len", _row_headroom, HookType.AFTER)
    hook("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", _leave_a_window, HookType.AFTER)
    hook("sglang.srt.managers.schedule_policy.PrefillAdder.__init__", _count_windows, HookType.AFTER)


def _window() -> int:
    """Slots for one iteration."""
    from sglang.srt.runtime_context import get_schedule, get_spec

    spec = get_spec()
    lag = 0 if get_schedule().disable_overlap_schedule else 2 * (spec.speculative_num_steps + 1)
    return int(spec.speculative_num_draft_tokens + lag)


def _row_headroom(usual: int) -> int:
    return max(usual, _window() + 4)


def _leave_a_window(info: tuple[Any, ...], worker: Any) -> tuple[Any, ...]:
    """The longest request, and the longest prompt, so that the window of its last iteration fits, too."""
    longest, prompt = info[LONGEST_REQUEST], info[LONGEST_PROMPT]
    over = max(0, longest + _window() - worker.model_runner.effective_logical_max_total_num_tokens)
    return (*info[:LONGEST_REQUEST], longest - over, prompt - over, *info[LONGEST_PROMPT + 1 :])


def _count_windows(_: None, adder: Any, *_given: Any, **_named: Any) -> None:
    """A prompt starts only where there is room for its own last iteration, and for the next one of those that
    run. With SGLang's own slot per request on top, the longest one would never start."""
    adder.per_req_token_overhead += _window() - adder.page_size
    if adder.running_batch is not None and adder.running_batch.reqs:
        adder.memory_budget.total_offset += adder.running_batch.new_tokens_required_next_decode()

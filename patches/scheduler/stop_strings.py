"""A request ends at its first stop, however many tokens were accepted at once.

Why: SGLang looks for stops in all tokens of an iteration together. It takes the first of the request's list
that it finds, not the first of the text, and any string rather than an end token in front of it. So with
several stops the answer would depend on how many candidates happened to be accepted. Here every token is
checked as if it had come alone, as in plain decoding.

Tokens behind the stop are not told, but SGLang has counted those that reason by then. Reasoning is the
beginning of an output, so no more of it can be told than there is output. SGLang also keeps these tokens, and
the next turn of a session would follow a text that the client has never seen. Of an answer that is aborted
meanwhile it tells them all.

Where the first token of a prompt completes the grammar, SGLang without overlap looks for that before it tells
the grammar, and another token comes if ``ignore_eos`` is set. So here the grammar is told first.

SGLang also takes what it does not know in a stop expression, such as ``[^z]``, for endless, and then searches
the whole answer after every token. Python knows how much such an expression can match at most.
"""

from __future__ import annotations

import re._parser as regex_parser  # type: ignore[import-not-found]
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook, is_active

Check = Callable[[Any, int], bool]


def register() -> None:
    request = "sglang.srt.managers.schedule_batch.Req"
    hook(f"{request}._check_str_based_finish", _check, HookType.AROUND, always=True)
    hook(f"{request}.update_finish_state", _ended, HookType.AFTER, always=True)
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor"
    prefilled = f"{processor}.SchedulerBatchResultProcessor.process_batch_result_prefill"
    hook(prefilled, _advance_grammars, HookType.BEFORE)
    hook("sglang.srt.session.session_controller.Session.create_req", _continue, HookType.BEFORE)
    longest = "sglang.srt.sampling.sampling_params.get_max_seq_length"
    hook(longest, lambda _, expression: longest_match(expression), HookType.AROUND)


def longest_match(regex_str: str) -> int:
    """Characters that the expression matches at most. To look around is refused by the boundary."""
    return int(regex_parser.parse(regex_str).getwidth()[1])


def _check(original: Check, self: Any, new_accepted_len: int = 1) -> bool:
    params = self.sampling_params
    stops = params.stop_strs or params.stop_regex_strs
    if new_accepted_len < 2 or not stops or not is_active():
        return original(self, new_accepted_len)
    return ends_within(original, self, new_accepted_len)


def ends_within(original: Check, req: Any, new_tokens: int) -> bool:
    """Whether one of the last tokens ends the request; if so, it is noted how and after which of them."""
    whole = req.output_ids
    try:
        for end in range(len(whole) - new_tokens + 1, len(whole) + 1):
            req.output_ids = whole[:end]
            if original(req, 1) or req._check_token_based_finish(whole[end - 1 : end]):
                req.finished_len = end
                return True
    finally:
        req.output_ids = whole
    return False


def _ended(_: None, self: Any, new_accepted_len: int = 1) -> None:
    if new_accepted_len < 2 or not is_active() or not self.finished():
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = self.finished_reason
    if isinstance(reason, FINISH_ABORT):
        ends_within(type(self)._check_str_based_finish, self, new_accepted_len)
        self.finished_reason = reason
    if self.finished_len is not None:
        self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)


def _advance_grammars(self: Any, batch: Any, result: Any) -> None:
    """By the prompts' first tokens, unless that is done: SGLang notes it."""
    self.advance_grammar_fsm(result, batch)


def _continue(self: Any, req: Any, *_: Any, **__: Any) -> None:
    """``self``: a session; ``req``: its next turn, which names the one before."""
    last = self.req_nodes.get(req.session_params.rid)
    if last is not None:
        last.req.output_ids = last.req.output_ids_through_stop

"""A request that leaves no token to choose is refused, or ends alone.

Why: min_new_tokens and grammars forbid tokens by a logit of -inf. Where that leaves none, probabilities are
NaN, and SGLang's draw of a prompt's first token raises, which ends the server for everybody: the grammar
``root ::= root`` with top_k is enough. So a grammar that allows no first token counts as one that cannot be
compiled. Further on, where the draws are ours, a grammar rejects what is drawn at a dead end. That ends the
request, by what SGLang takes for an error of its own (500). A request that was retracted there is prefilled
again, so forbidden logits are finite in prefills.

Where all that the grammar allows is an end that comes too early for min_new_tokens, the grammar prevails.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from adaserve.patches import hook

TOO_EARLY = -1e30
"""Added to the logits of tokens that would end a request before its min_new_tokens."""

FORBIDDEN = -1e32
"""The logit of a token that a grammar forbids. Both are finite even over the lowest temperature, 1e-6."""

NOTHING = "the grammar allows no token here: it has a rule that cannot be completed, such as root ::= root"


def register() -> None:
    penalty = "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer._prepare"
    hook(penalty, _too_early, HookType.AFTER)
    backend = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._init_value_dispatch"
    hook(backend, _compiled, HookType.AFTER)
    logits = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo._apply_post_grammar_logits_transforms"
    hook(logits, _forbidden, HookType.AFTER)
    processor = (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    )
    hook(f"{processor}._accept_grammar_tokens", _rejected, HookType.AFTER)


def _too_early(_: None, penalizer: Any) -> None:
    penalizer.stop_token_penalties.clamp_(min=TOO_EARLY)


def _compiled(grammar: Any, backend: Any, *_: Any) -> Any:
    """In a thread of SGLang's, once for each grammar."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    if grammar is None or isinstance(grammar, InvalidGrammarObject):
        return grammar
    return InvalidGrammarObject(NOTHING) if allows_nothing(grammar, backend.vocab_size) else grammar


def _forbidden(_: None, info: Any, logits: Tensor) -> None:
    if info.grammar_mask is not None:
        logits.clamp_(min=FORBIDDEN)


def _rejected(_: list[int], processor: Any, req: Any, tokens: Any) -> None:
    """Says so where the fault is the grammar's: any other rejected token would be ours."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    end = req.to_finish
    if not isinstance(end, FINISH_ABORT) or end.status_code != HTTPStatus.INTERNAL_SERVER_ERROR:
        return
    if allows_nothing(req.grammar, processor.model_config.vocab_size):
        req.to_finish = FINISH_ABORT(NOTHING, HTTPStatus.BAD_REQUEST, "BadRequestError")


def allows_nothing(grammar: Any, vocab_size: int) -> bool:
    """Whether SGLang's grammar object is at a dead end."""
    mask = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    logits = torch.zeros(1, vocab_size)
    grammar.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return bool(logits.isneginf().all())

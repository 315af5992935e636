"""Where a grammar allows nothing, a token is drawn all the same, and the request ends for what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from adaserve.patches.scheduler import no_allowed_token


class Grammar:
    """Allows some tokens of four."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return torch.ones(batch_size, vocab_size, dtype=torch.bool)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row, self.tokens] = False

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        logits.masked_fill_(vocab_mask, -torch.inf)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1000.0])
def test_a_prefill_draws_what_is_allowed_or_anything(temperature: float) -> None:
    logits = torch.tensor([[5.0, -torch.inf, -torch.inf], [-torch.inf] * 3])
    no_allowed_token._forbidden(None, SimpleNamespace(grammar_mask=object()), logits)
    probs = torch.softmax(logits / temperature, dim=-1)
    assert probs[0].tolist() == [1, 0, 0] and probs[1].isfinite().all()
    torch.multinomial(probs, 1)  # raises where there are NaN


def test_a_grammar_that_allows_no_first_token_cannot_be_compiled() -> None:
    backend, wrong = SimpleNamespace(vocab_size=4), InvalidGrammarObject("root ::= is no rule")
    for grammar in (None, wrong, Grammar(2)):
        assert no_allowed_token._compiled(grammar, backend) is grammar
    assert no_allowed_token._compiled(Grammar(), backend).error_message == no_allowed_token.NOTHING


def finished(grammar: Grammar, reason: Any) -> Any:
    req = SimpleNamespace(grammar=grammar, to_finish=reason)
    no_allowed_token._rejected([], SimpleNamespace(model_config=SimpleNamespace(vocab_size=4)), req, [0])
    return req.to_finish


def test_only_a_dead_end_is_the_clients_fault() -> None:
    ours, gone = FINISH_ABORT("not accepted", 500), FINISH_ABORT("gone", 499)
    assert finished(Grammar(), ours).status_code == 400
    assert finished(Grammar(2), ours) is ours
    assert finished(Grammar(), gone) is gone
    assert finished(Grammar(), None) is None

"""Why a grammar is refused is said in a sentence, for whatever xgrammar cannot compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from xgrammar import GrammarCompiler, TokenizerInfo

from adaserve.patches.scheduler.grammar_errors import _told

NOTHING = "it cannot be compiled, and the compiler does not say why"


class Backend(XGrammarGrammarBackend):
    """SGLang's, without what it needs of a server."""

    def __init__(self) -> None:
        tokens = TokenizerInfo([*map(chr, range(32, 127)), "</s>"], stop_token_ids=[95])
        self.grammar_compiler = GrammarCompiler(tokens, max_threads=1)
        self.any_whitespace, self.max_whitespace_cnt = False, None

    def _from_context(self, context: Any, *_: Any) -> Any:
        return SimpleNamespace(grammar_stats=None, context=context)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json", '{"type": "nope"}', 'Unsupported type "nope"'),
        ("json", '{"type": "number", "minimum": 1e308, "maximum": 1e309}', NOTHING),
        ("json", '{"type": "integer", "minimum": 1.5}', "Integer constraint must be a whole number"),
        ("regex", "(?i)abc", "Regex parsing error at position 3: Group modifier flag is not supported yet."),
        ("ebnf", "root ::= ", "EBNF parser error at line 1, column 10: Expect element, but got"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "nope"}}',
         "Invalid structural tag error: Format type not recognized: nope"),
        ("structural_tag", '{"structures": [{"begin": "", "schema": {}}], "triggers": []}', "it lacks 'end'"),
    ],
)  # fmt: skip
def test_the_reason_is_a_line_without_places_in_a_source(kind: str, text: str, why: str) -> None:
    grammar = _told(Backend._init_value_dispatch, Backend(), (kind, text), False)
    assert isinstance(grammar, InvalidGrammarObject) and grammar.error_message == why


def test_a_grammar_is_passed_on() -> None:
    assert _told(Backend._init_value_dispatch, Backend(), ("regex", "a"), False).context is not None

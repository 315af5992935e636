"""What is wrong with a grammar is said in a sentence.

Why: SGLang answers with what xgrammar says: the time, a file and a line of its source, and a condition in C++
that did not hold. For a schema with the maximum 1e309, and for some structural tags, it says nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary.wording import of_compiler
from adaserve.patches import hook


def register() -> None:
    backend = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend._init_value_dispatch"
    hook(backend, _told, HookType.AROUND)


def _told(original: Callable[..., Any], *args: Any) -> Any:
    """In a thread of SGLang's, once for each grammar."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    try:
        grammar = original(*args)
    except Exception as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return InvalidGrammarObject(of_compiler(said))
    if isinstance(grammar, InvalidGrammarObject):
        return InvalidGrammarObject(of_compiler(grammar.error_message))
    return grammar

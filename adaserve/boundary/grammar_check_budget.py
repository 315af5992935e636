"""Limits the work of checking the grammars of one request.

Each grammar has limits of its own. But a batch may hold thousands of them and a schema hundreds of patterns,
and they are checked in the loop that answers everybody.
"""

from __future__ import annotations

from adaserve.boundary.errors import RequestError

MAX_GRAMMAR_BUDGET = 1 << 19
"""Of one request. Twenty kinds of grammars used it up in 0.01 to 0.7 s of processor time. Of 9,557 schemas in
JSONSchemaBench the costliest takes 213,146, and one in a hundred more than 30,000."""

GRAMMAR = 1000
"""What a grammar takes besides its characters and terms, and the steps of the search for its ways."""

SCHEMA = 16
"""What a schema inside of another one takes."""

CHARACTERS = 8
"""Of a grammar's text that take one; a regular expression's take one each, too."""


class GrammarBudget:
    """What is left of it. A grammar that several prompts of a batch have is judged once."""

    __slots__ = ("_judged", "_left")

    def __init__(self) -> None:
        self._left = MAX_GRAMMAR_BUDGET
        self._judged: set[tuple[str, str]] = set()

    def is_new(self, kind: str, text: str) -> bool:
        """Whether this grammar is to be judged. Raises RequestError where they are too many."""
        if (kind, text) in self._judged:
            return False
        self._judged.add((kind, text))
        self.spend(GRAMMAR + len(text) // CHARACTERS)
        return True

    def spend(self, amount: int) -> None:
        """Raises RequestError where nothing is left."""
        self._left -= amount
        if self._left < 0:
            raise RequestError(
                "the grammars of this request are too many, or too large together, to be checked: send fewer "
                "different ones at a time"
            )

"""The largest number of places in a regular expression that one text can lead to.

A grammar's matcher follows every way in which a text may have been matched so far. For most expressions that
is one or a few; for ``([a-z]?){0,99}`` a single letter leads to 99 places, and masking the next token takes
seconds of the scheduler's loop. An expression with one way matches the same texts: ``[a-z]{0,99}``.
"""

from __future__ import annotations

import re
import re._parser as regex_parser  # type: ignore[import-not-found]
from collections.abc import Iterator, Sequence
from typing import Any

from adaserve.boundary.ebnf import AGAIN
from adaserve.boundary.errors import RequestError, TooLargeError
from adaserve.boundary.grammar_check_budget import GrammarBudget
from adaserve.boundary.limits import MAX_GRAMMAR_SIZE

MAX_PLACES = 32
"""Places that one text may lead to: a mask then takes milliseconds where vocabularies are small."""

MAX_STEPS = 150_000
"""Of the search for such a text: 0.1 to 0.2 s."""

NODES_PER_STEP = 5000
"""Of an automaton with this many more nodes, a step takes as long as one more of a small automaton's."""

MAX_FIXED = 8
"""Characters that are written out where exactly so many are repeated, as in [0-9]{4}."""

SINGLE = {regex_parser.LITERAL, regex_parser.NOT_LITERAL, regex_parser.IN, regex_parser.ANY}
REPEATS = {regex_parser.MAX_REPEAT, regex_parser.MIN_REPEAT, regex_parser.POSSESSIVE_REPEAT}
UNBOUNDED = regex_parser.MAXREPEAT

_LAST_CHARACTER = 0x10FFFF
_NAMED = re.compile(r"(\\.)|\(\?<(?![=!])[^>()]*>", re.DOTALL)
"""A named group as JavaScript writes it; Python's differ. An escaped character is stepped over."""
_CATEGORIES = {
    regex_parser.CATEGORY_DIGIT: [(48, 57)],
    regex_parser.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    regex_parser.CATEGORY_SPACE: [(9, 13), (32, 32), (160, 160)],
}
_NEGATED = {
    regex_parser.CATEGORY_NOT_DIGIT: regex_parser.CATEGORY_DIGIT,
    regex_parser.CATEGORY_NOT_WORD: regex_parser.CATEGORY_WORD,
    regex_parser.CATEGORY_NOT_SPACE: regex_parser.CATEGORY_SPACE,
}

Ranges = tuple[tuple[int, int], ...]
"""Characters, by their first and last code points: in order, and apart."""


def require_few_ways(name: str, expression: str, budget: GrammarBudget) -> int:
    """Terms of the expression, once its counted repeats are written out.

    Raises RequestError if a text can lead to more than ``MAX_PLACES`` places of the expression that go on
    with the same character, TooLargeError if it has more than ``MAX_GRAMMAR_SIZE`` terms, or if it takes too
    long to find out. All sets of places that some text leads to are visited, as when a deterministic
    automaton is made (Rabin and Scott 1959).
    """
    automaton = _Automaton(name)
    try:
        pattern = regex_parser.parse(_NAMED.sub(lambda found: found[1] or "(", expression))
        start = automaton.add(pattern, automaton.branch(()), counted=False)
    except (re.error, OverflowError) as error:
        raise RequestError(f"{name} is not a valid regular expression: {error}") from None
    except RecursionError:
        raise TooLargeError(f"{name} is nested too deeply") from None
    automaton.require_few_ways(start)
    budget.spend(len(expression) + automaton.size + automaton.steps)
    return automaton.size


class _Automaton:
    """Nodes that either read a character or lead on without one. A set of nodes is an integer: node i is
    in it if bit i is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._reads: list[Ranges | None] = []  # by node: the characters it reads, None = a branch
        self._next: list[tuple[int, ...]] = []  # by node: where it leads
        self._reached: dict[int, int] = {}  # by node: those that read, reached from it without a character
        self.size = self.steps = 0

    def branch(self, to: tuple[int, ...]) -> int:
        self._reads.append(None)
        self._next.append(to)
        return len(self._next) - 1

    def add(self, pattern: Any, after: int, *, counted: bool) -> int:
        """The first node of ``pattern``, which leads to the node ``after`` at its end.

        ``counted``: inside of a group that is repeated. Elsewhere a repeated character is one place, whatever
        its bounds: the matcher counts there.
        """
        items = list(pattern)
        while items:
            operator, argument = items.pop()
            if items and _is_rest_of_list(operator, argument, items[-1]):
                after = self._add_list(items.pop()[1][3], list(argument[2])[:-1], after)
            elif operator in REPEATS:
                after = self._add_repeat(argument, after, counted=counted)
            elif operator is regex_parser.BRANCH:
                after = self._add_ways([list(way) for way in argument[1]], after, counted=counted)
            elif operator is regex_parser.SUBPATTERN:
                after = self.add(argument[3], after, counted=counted)
            elif operator in SINGLE:
                after = self._character(_characters(operator, argument), after)
            elif operator is not regex_parser.AT:
                raise RequestError(f"{self.name} may not hold look-around, conditions or back-references")
        return after

    def _add_list(self, item: Any, separator: list[Any], after: int) -> int:
        loop = self.branch(())
        entry = self.add(item, loop, counted=True)
        self._next[loop] = (self.add(separator, entry, counted=True), after)
        return entry

    def _add_ways(self, ways: list[list[Any]], after: int, *, counted: bool) -> int:
        """Alternatives; those that begin with the same characters share them, as in the matcher."""
        first: list[int] = []
        shared: dict[int, list[list[Any]]] = {}
        for way in ways:
            if way and way[0][0] is regex_parser.LITERAL:
                shared.setdefault(way[0][1], []).append(way)
            else:
                first.append(self.add(way, after, counted=counted))
        for same in shared.values():
            length = _shared_length(same)
            rests = [way[length:] for way in same]
            then = self._add_ways(rests, after, counted=counted) if len(rests) > 1 else None
            whole = same[0] if then is None else same[0][:length]
            first.append(self.add(whole, after if then is None else then, counted=counted))
        return self.branch(tuple(first))

    def _character(self, characters: Ranges, after: int) -> int:
        self._grow(1)
        self._reads.append(characters)
        self._next.append((after,))
        return len(self._next) - 1

    def _grow(self, terms: int) -> None:
        self.size += terms
        if self.size > MAX_GRAMMAR_SIZE:
            raise TooLargeError(
                f"{self.name} may have at most {MAX_GRAMMAR_SIZE} terms once its counted repeats are "
                "written out"
            )

    def _add_repeat(self, repeat: Any, after: int, *, counted: bool) -> int:
        low, high, body = repeat
        single = len(body) == 1 and body[0][0] in SINGLE
        if high > 1 and not single:
            if high != UNBOUNDED and body.getwidth()[0] == 0:
                raise RequestError(
                    f"{self.name}: what is repeated up to {high} times must match at least one character; "
                    "write [a-z]{0,9} and not ([a-z]?){0,9}"
                )
            if _may_be_loop(body):
                raise RequestError(
                    f"{self.name} can match one text in too many ways: a repeated group may not be all that "
                    "another one repeats, where it matches single characters; write (x)+ and not ((x)+)+"
                )
            counted = True
        if high == UNBOUNDED or (single and not counted and high > 1 and not low == high <= MAX_FIXED):
            self._grow(0 if high == UNBOUNDED else high)
            loop = self.branch(())
            self._next[loop] = (self.add(body, loop, counted=counted), after)
            return self.add(body, loop, counted=counted) if low else loop
        entry = after
        for _ in range(high - low):
            entry = self.branch((self.add(body, entry, counted=counted), after))
        for _ in range(low):
            entry = self.add(body, entry, counted=counted)
        return entry

    def require_few_ways(self, start: int) -> None:
        readers = self._readers()
        first = self._places(start)
        seen, waiting = {first}, [first]
        while waiting:
            places = waiting.pop()
            self._count(1)
            for move in {places & nodes for nodes in readers}:
                if (open_at_once := move.bit_count()) > MAX_PLACES:
                    raise RequestError(
                        f"{self.name} can match one text in too many ways (more than {MAX_PLACES} places of "
                        "it are open at once); let each part of a repeated group end in a character "
                        "that does not occur inside it, as in ([a-z]{1,9} ){0,9}, and do not repeat what is "
                        "optional"
                    )
                self._count(open_at_once)
                to = 0
                for node in _members(move):
                    to |= self._places(self._next[node][0])
                if to not in seen:
                    seen.add(to)
                    waiting.append(to)

    def _readers(self) -> list[int]:
        """All different sets of nodes that read one and the same character."""
        changes: dict[int, int] = {}  # by edge: nodes that read what is on one side of it only
        for node, ranges in enumerate(self._reads):
            for low, high in ranges or ():
                changes[low] = changes.get(low, 0) ^ 1 << node
                changes[high + 1] = changes.get(high + 1, 0) ^ 1 << node
        sets, nodes = set(), 0
        for edge in sorted(changes):
            self._count(1)
            nodes ^= changes[edge]
            sets.add(nodes)
        return list(sets)

    def _places(self, start: int) -> int:
        """Nodes that read a character, reached from ``start`` without one."""
        if (known := self._reached.get(start)) is not None:
            return known
        seen, waiting, places = {start}, [start], 0
        while waiting:
            self._count(1)
            node = waiting.pop()
            if self._reads[node] is not None:
                places |= 1 << node
                continue
            for to in self._next[node]:
                if to not in seen:
                    seen.add(to)
                    waiting.append(to)
        self._reached[start] = places
        return places

    def _count(self, steps: int) -> None:
        self.steps += steps * (1 + self.size // NODES_PER_STEP)
        if self.steps > MAX_STEPS:
            raise TooLargeError(
                f"{self.name} is too large to be checked; write it with fewer or shorter parts"
            )


def _is_rest_of_list(operator: Any, argument: Any, before: Any) -> bool:
    """Whether this says that a list, whose first item stands ``before`` it, goes on (``ebnf.AGAIN``)."""
    if operator not in REPEATS or before[0] is not regex_parser.SUBPATTERN:
        return False
    return len(argument[2]) > 1 and argument[2][-1] == (regex_parser.LITERAL, ord(AGAIN))


def _members(nodes: int) -> Iterator[int]:
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest


def _shared_length(ways: list[list[Any]]) -> int:
    """Characters with which all of the alternatives begin; at least one."""
    length = min(map(len, ways))
    for at in range(1, length):
        if any(way[at] != ways[0][at] or way[at][0] is not regex_parser.LITERAL for way in ways):
            return at
    return length


def _may_be_loop(pattern: Any) -> bool:
    """Whether a match of ``pattern`` may be all of a repeated group whose parts may be single characters.

    If that is repeated as well, each character may begin a new part of either, and what the matcher keeps
    grows with the square of the text.
    """
    items = list(pattern)
    needed = [item for item in items if _least_width(*item) > 0]
    if len(needed) > 1:
        return False
    for operator, argument in needed or items:
        if operator in REPEATS:
            _, high, body = argument
            single = len(body) == 1 and body[0][0] in SINGLE
            if high > 1 and not single and body.getwidth()[0] <= 1:
                return True
            parts = [body]
        elif operator is regex_parser.SUBPATTERN:
            parts = [argument[3]]
        else:
            parts = argument[1] if operator is regex_parser.BRANCH else []
        if any(map(_may_be_loop, parts)):
            return True
    return False


def _least_width(operator: Any, argument: Any) -> int:
    """Characters that one item of a pattern matches at least."""
    if operator in SINGLE:
        return 1
    if operator in REPEATS:
        return int(argument[0] * argument[2].getwidth()[0])
    if operator is regex_parser.BRANCH:
        return min(int(way.getwidth()[0]) for way in argument[1])
    return int(argument[3].getwidth()[0]) if operator is regex_parser.SUBPATTERN else 0


def _characters(operator: Any, argument: Any) -> Ranges:
    if operator is regex_parser.LITERAL:
        return ((argument, argument),)
    if operator is regex_parser.NOT_LITERAL:
        return _others([(argument, argument)])
    if operator is regex_parser.ANY:
        return ((0, _LAST_CHARACTER),)
    ranges: list[tuple[int, int]] = []
    negated = False
    for kind, value in argument:
        if kind is regex_parser.NEGATE:
            negated = True
        elif kind is regex_parser.LITERAL:
            ranges.append((value, value))
        elif kind is regex_parser.RANGE:
            ranges.append(value)
        elif value in _NEGATED:
            ranges.extend(_others(_CATEGORIES[_NEGATED[value]]))
        else:
            ranges.extend(_CATEGORIES[value])
    others = _others(ranges)
    return others if negated else _others(others)


def _others(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All characters that are in none of ``ranges``."""
    gaps, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _LAST_CHARACTER:
        gaps.append((start, _LAST_CHARACTER))
    return tuple(gaps)

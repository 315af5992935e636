"""Turns an EBNF grammar into one regular expression, so that it is checked like a regular expression.

A rule's name becomes what the rule says. A recursive rule is written out ``depth`` times. Below that it
stands for something that nothing else matches: where its text can lead further down is not known here, and is
watched while it is matched.
"""

from __future__ import annotations

import re
import re._parser as regex_parser  # type: ignore[import-not-found]
from collections import Counter
from dataclasses import dataclass, field

from adaserve.boundary.errors import RequestError, TooLargeError
from adaserve.boundary.limits import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_DEPTH

CUT = "\ue000"
"""A private character: where a recursion is cut off."""

AGAIN = "\ue001"
"""Another one: where a list goes on, as in ``(item)(?:,<AGAIN>)*``. Levels of precedence are lists of lists,
and each would double the expression if the item were written out twice."""

Terms = list[tuple[str, str]]

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?!\^?\])(?:[^\]\\]|\\.)+\])
    |(?P<any>\[\^\])
    |(?P<rule>[A-Za-z_.][\w.-]*(?=\s*::=))
    |(?P<name>[A-Za-z_.][\w.-]*)
    |(?P<defined>::=)
    |(?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|*+?])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    r"\\([nrt\"\\'\[\]\-/^fv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|\\?(.)", re.DOTALL
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def as_regex(name: str, grammar: str, depth: int, *, lists: bool = False) -> str:
    """The grammar's rule ``root`` as a regular expression of Python's, or with ``lists`` as one of
    ``ambiguity``'s.

    Raises RequestError for text that is not EBNF and for a name without a rule, TooLargeError where the
    expression would be longer than a grammar may be.
    """
    rules = _rules(name, grammar)
    if "root" not in rules:
        raise RequestError(f"{name} must have a rule named root")
    return _Writer(name, rules, depth, lists).write("root")


@dataclass
class _Writer:
    name: str
    rules: dict[str, Terms]
    depth: int
    lists: bool
    _open: Counter[str] = field(default_factory=Counter)
    _length: int = 0

    def write(self, rule: str) -> str:
        if rule not in self.rules:
            raise RequestError(f"{self.name} has no rule named {rule[:60]!r}")
        if self._open[rule] >= self.depth:
            return CUT
        if sum(self._open.values()) >= MAX_GRAMMAR_DEPTH:
            raise TooLargeError(
                f"{self.name} may have at most {MAX_GRAMMAR_DEPTH} rules inside of each other"
            )
        self._open[rule] += 1
        written = self._write(self.rules[rule])
        self._open[rule] -= 1
        return written

    def _write(self, terms: Terms) -> str:
        parts, at = [], 0
        while at < len(terms):
            kind, value = terms[at]
            at += 1
            self._length += len(value)
            if self._length > MAX_GRAMMAR_CHARACTERS:
                raise TooLargeError(
                    f"{self.name} is too large to be checked: with its rules written out it is longer than "
                    f"{MAX_GRAMMAR_CHARACTERS} characters"
                )
            if kind != "name":
                parts.append(value)
                continue
            item = self.write(value)
            end = _end_of_list(terms, at, value) if self.lists else 0
            separator = self._write(terms[at + 1 : end - 3]) if end else ""
            if CUT not in separator and _is_certain(separator) and _is_certain(item):
                parts.append(f"({item})(?:{separator}{AGAIN})*")
                at = end
            else:
                parts.append(f"(?:{item})")
        return "".join(parts)


def _end_of_list(terms: Terms, at: int, item: str) -> int:
    """The end of ``(separator item)*`` that begins at ``at``; 0 if there is no such thing."""
    depth = 0
    for i in range(at, len(terms)):
        if terms[i] == ("piece", "(?:"):
            depth += 1
        elif terms[i] == ("piece", ")"):
            depth -= 1
        if depth <= 0 or (depth == 1 and terms[i] == ("piece", "|")):
            ends = [("name", item), ("piece", ")"), ("piece", "*")]
            return i + 2 if terms[i - 1 : i + 2] == ends else 0
    return 0


def _is_certain(expression: str) -> bool:
    """Whether it matches at least one character."""
    try:
        return bool(regex_parser.parse(expression).getwidth()[0] > 0)
    except (re.error, OverflowError, RecursionError):
        return False


def _rules(name: str, grammar: str) -> dict[str, Terms]:
    """The terms of each rule: names of rules, and pieces of a regular expression."""
    rules: dict[str, Terms] = {}
    terms: Terms | None = None
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise RequestError(f"{name} is not valid EBNF: {grammar[at : at + 20]!r} is not understood")
        at, kind, value = found.end(), str(found.lastgroup), found[0]
        if kind in ("skip", "defined"):
            continue
        if kind == "rule":
            terms = rules[value] = []
        elif terms is None:
            raise RequestError(f'{name} must begin with a rule, as in: root ::= "yes" | "no"')
        else:
            terms.append(("name", value) if kind == "name" else ("piece", _piece(kind, value)))
    return rules


def _piece(kind: str, value: str) -> str:
    if kind == "string":
        return f"(?:{re.escape(_ESCAPE.sub(_plain, value[1:-1]))})"
    if kind == "set":
        return value
    if kind == "any":
        return r"[\s\S]"
    if kind == "repeat":
        return re.sub(r"\s", "", value)
    return "(?:" if value == "(" else value


def _plain(found: re.Match[str]) -> str:
    code, other = found[1], found[2]
    if code is None:
        return str(other)
    if len(code) > 1:
        return chr(min(int(code[1:], 16), 0x10FFFF))
    return _CONTROL.get(code, code)

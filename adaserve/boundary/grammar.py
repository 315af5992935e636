"""Grammars that a request may ask for: nothing endless, nothing that costs out of all proportion.

A schema or expression is compiled in the scheduler's process, and a stop expression is matched in its
loop after every iteration, so one that never ends stops everybody.
"""

from __future__ import annotations

import json
import re
import re._parser as regex_parser  # type: ignore[import-not-found]
from typing import Any

from adaserve.boundary.errors import RequestError, shown
from adaserve.boundary.limits import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_GRAMMAR_DEPTH,
    MAX_GRAMMAR_SIZE,
    MAX_SCHEMA_PROPERTIES,
    MAX_STOP_WAYS,
    Limits,
)
from adaserve.boundary.values import text

ANY_JSON = "$$ANY$$"
"""SGLang's name for "any JSON value"."""

_text = text(MAX_GRAMMAR_CHARACTERS)
_stop_text = text(256)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_SINGLE = {regex_parser.LITERAL, regex_parser.NOT_LITERAL, regex_parser.IN, regex_parser.ANY}
_REPEATS = {regex_parser.MAX_REPEAT, regex_parser.MIN_REPEAT, regex_parser.POSSESSIVE_REPEAT}
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*')
"""A string or a comment of EBNF, in which a bracket or brace means nothing."""
_COUNTED = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")


def json_schema(name: str, value: Any, limits: Limits) -> None:
    """A JSON schema as text: not recursive, not deep, its references inside itself."""
    _text(name, value, limits)
    if value not in ("", ANY_JSON):
        _Schema(name, _parse(name, value)).check()


def structural_tag(name: str, value: Any, limits: Limits) -> None:
    """A structural tag as JSON text; every schema in it is checked like ``json_schema``."""
    _text(name, value, limits)
    if value == "":
        return
    found = [_parse(name, value)]
    if not isinstance(found[0], dict):
        raise RequestError(f"{name} must be a JSON object, got {shown(found[0])}")
    while found:
        node = found.pop()
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            if key in ("schema", "json_schema") and isinstance(item, dict):
                _Schema(f"{name}.{key}", item).check()
            elif isinstance(item, dict | list):
                found.append(item)


def regex(name: str, value: Any, limits: Limits) -> None:
    """A regular expression that the output matches as a whole."""
    _text(name, value, limits)
    _require_size(name, value)


def ebnf(name: str, value: Any, limits: Limits) -> None:
    """A grammar in EBNF; its rules may be recursive, its counted repeats may not explode."""
    _text(name, value, limits)
    _require_size(name, _QUOTED.sub("x", value))


def stop_regex(name: str, value: Any, limits: Limits) -> None:
    """A regular expression after whose match generation stops, of a kind that is matched fast.

    Python's matcher tries every way in which repeats and alternatives can share out the text: for
    ``(a+)+`` or ``(a|a)*`` exponentially many. So they must be few in all, and end.
    """
    _stop_text(name, value, limits)
    try:
        ways = _ways(name, regex_parser.parse(value))
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"{name} is no regular expression: {error}") from None
    if ways > MAX_STOP_WAYS:
        raise RequestError(
            f"{name} may try at most {MAX_STOP_WAYS} ways to match at one place, got {shown(ways)}; give its "
            "repeats small upper bounds, as in [0-9]{1,20}"
        )


def _ways(name: str, pattern: Any) -> int:
    """Ways in which a pattern can match at one place, at most. Raises RequestError for what has no bound."""
    ways = 1
    for operator, argument in pattern:
        if operator in _REPEATS:
            low, high, body = argument
            if high == regex_parser.MAXREPEAT:
                raise RequestError(f"{name}: * and + have no bound; write {{0,50}} or {{1,50}}")
            if high > 1 and (len(body) != 1 or body[0][0] not in _SINGLE):
                raise RequestError(f"{name} may repeat single characters and classes, not groups")
            ways *= (high - low + 1) * _ways(name, body)
        elif operator is regex_parser.BRANCH:
            ways *= sum(_ways(name, branch) for branch in argument[1])
        elif operator is regex_parser.SUBPATTERN:
            ways *= _ways(name, argument[3])
        elif operator not in _SINGLE and operator is not regex_parser.AT:
            raise RequestError(f"{name} may not hold look-around, conditions or back-references")
    return ways


def _parse(name: str, value: str) -> Any:
    if _depth(value) > MAX_GRAMMAR_DEPTH:
        raise RequestError(f"{name} may be nested at most {MAX_GRAMMAR_DEPTH} levels deep")
    try:
        return json.loads(value)
    except ValueError as error:
        raise RequestError(f"{name} must be JSON: {error}") from None


def _depth(value: str) -> int:
    """Brackets open at once, at most; those in strings count too, which no real schema notices."""
    depth = deepest = 0
    for character in value:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _require_size(name: str, expression: str) -> None:
    if _depth(expression) > MAX_GRAMMAR_DEPTH:
        raise RequestError(f"{name} may be nested at most {MAX_GRAMMAR_DEPTH} levels deep")
    if expanded_size(expression) > MAX_GRAMMAR_SIZE:
        raise RequestError(
            f"{name} may have at most {MAX_GRAMMAR_SIZE} terms once its counted repeats are written out"
        )


def expanded_size(expression: str) -> int:
    """Terms of a regular expression, or of EBNF, once ``x{3,5}`` is written as five x; never too few.

    A character counts 1, a class in brackets 1, a group the sum of what it holds.
    """
    groups = [0]  # size of each open group
    last = 1  # size of the term before the current place
    i = 0
    while i < len(expression):
        character = expression[i]
        counted = _COUNTED.match(expression, i) if character == "{" else None
        if counted:
            times = max((int(n[:9]) for n in counted.groups() if n), default=1)
            groups[-1] += last * max(0, times - 1)
            last *= max(1, times)
            i = counted.end()
            continue
        if character == "(":
            groups.append(0)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            if character == "\\":
                i += 1
            elif character == "[":
                i = _class_end(expression, i)
            last = 1
            groups[-1] += 1
        i += 1
    return sum(groups)


def _class_end(expression: str, i: int) -> int:
    """Place of the bracket that closes the class which opens at ``i``; the last character if none does."""
    i += 1
    while i < len(expression) and expression[i] != "]":
        i += 2 if expression[i] == "\\" else 1
    return min(i, len(expression) - 1)


class _Schema:
    """One walk over a schema: its references are followed, and one that comes back to itself is refused."""

    def __init__(self, name: str, root: Any) -> None:
        self.name, self.root = name, root
        self._open: set[int] = set()  # subschemas that the walk is inside of, by identity
        self._done: set[int] = set()

    def check(self) -> None:
        if not isinstance(self.root, dict | bool):
            raise RequestError(f"{self.name} must be a JSON schema, an object, got {shown(self.root)}")
        self._walk(self.root, 0)

    def _walk(self, node: Any, depth: int) -> None:
        if not isinstance(node, dict | list) or id(node) in self._done:
            return
        if depth > 4 * MAX_GRAMMAR_DEPTH:
            raise RequestError(f"{self.name} may follow at most {4 * MAX_GRAMMAR_DEPTH} levels of references")
        if id(node) in self._open:
            raise RequestError(f"{self.name} must not be recursive: a $ref in it leads back to itself")
        self._open.add(id(node))
        if isinstance(node, dict):
            self._check_counts(node)
            for key, item in node.items():
                if key in ("$defs", "definitions"):
                    continue  # checked where a reference uses them
                self._walk(item, depth + 1)
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                if key in node and not isinstance(node[key], dict | list):
                    self._walk(self._target(node[key]), depth + 1)
        else:
            for item in node:
                self._walk(item, depth + 1)
        self._open.discard(id(node))
        self._done.add(id(node))

    def _check_counts(self, node: dict[str, Any]) -> None:
        for key in _COUNTS:
            count = node.get(key)
            if isinstance(count, int | float) and not 0 <= count <= MAX_GRAMMAR_SIZE:
                raise RequestError(
                    f"{self.name}: {key} must be from 0 to {MAX_GRAMMAR_SIZE}, got {shown(count)}"
                )
        properties = node.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_SCHEMA_PROPERTIES:
            raise RequestError(
                f"{self.name}: an object may have at most {MAX_SCHEMA_PROPERTIES} properties, "
                f"got {len(properties)}"
            )
        if isinstance(node.get("pattern"), str):
            _require_size(f"{self.name}: pattern", node["pattern"])

    def _target(self, reference: Any) -> Any:
        """What ``reference`` points to. Raises RequestError for another document, and for nothing."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise RequestError(f"{self.name}: $ref must be # or start with #/, got {shown(reference)}")
        node = self.root
        for escaped in reference[1:].split("/")[1:]:
            part = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isascii() and part.isdecimal() and int(part[:9]) < len(node):
                node = node[int(part[:9])]
            else:
                raise RequestError(f"{self.name}: $ref {shown(reference)} points to nothing in the schema")
        return node

"""Checks the grammars of a request: none may be endless or disproportionately expensive.

A schema or expression is compiled in the scheduler's process, and a stop expression is matched in its
loop after every iteration, so one that never ends stops everybody.
"""

from __future__ import annotations

import json
import re
import re._parser as regex_parser  # type: ignore[import-not-found]
from collections import Counter
from contextlib import suppress
from graphlib import TopologicalSorter
from typing import Any

from adaserve.boundary.ambiguity import MAX_PLACES, REPEATS, SINGLE, UNBOUNDED, require_few_ways
from adaserve.boundary.ebnf import as_regex
from adaserve.boundary.errors import RequestError, TooLargeError, shown
from adaserve.boundary.grammar_check_budget import SCHEMA, GrammarBudget
from adaserve.boundary.limits import (
    INT64_MAX,
    MAX_GRAMMAR_CHARACTERS,
    MAX_GRAMMAR_DEPTH,
    MAX_GRAMMAR_SIZE,
    MAX_SCHEMA_CHARACTERS,
    MAX_SCHEMA_LEVELS,
    MAX_SCHEMA_PROPERTIES,
    MAX_STOP_WAYS,
    MAX_STOPS,
    Limits,
)
from adaserve.boundary.values import one_or_list, text

ANY_JSON = "$$ANY$$"
"""SGLang's name for "any JSON value"."""

_text = text(MAX_GRAMMAR_CHARACTERS)
_json_text = text(MAX_SCHEMA_CHARACTERS)
_stop_text = text(256, least=1)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_CHOICES = ("anyOf", "oneOf", "type")
_SAME_VALUE = ("anyOf", "oneOf", "allOf")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_NO_SCHEMAS = ("const", "enum", "default", "examples", "$defs", "definitions")
"""Values, and what counts only where a reference uses it."""
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_REPEATED_PARTS = ("optional", "plus", "star", "repeat")
_GROUPS = [
    re.compile(r"\\.|\[\^?" + first + r"(?:\\.|[^\]\\])*+|([()])", re.DOTALL) for first in ("", r"\]?")
]
"""Where groups of an expression begin and end; escaped characters and character classes are stepped over. A
"]" that stands first in a class is its end in JavaScript, and a character of it in Python."""


def json_schema(name: str, value: Any, limits: Limits) -> None:
    """A JSON schema as text: not deep, its references inside itself, each to something that says a value."""
    _json_text(name, value, limits)
    if value not in ("", ANY_JSON) and limits.grammar_budget.is_new("json_schema", value):
        _Schema(name, _parse(name, value), limits.grammar_budget).check()


def structural_tag(name: str, value: Any, limits: Limits) -> None:
    """A structural tag as JSON text; every schema, expression and grammar in it is checked as alone.

    One that SGLang made of tools may be as large as they are: each tool has parts of its own, of which the
    first characters say whose they are.
    """
    if not limits.of_tools:
        _json_text(name, value, limits)
    if value == "" or not limits.grammar_budget.is_new("structural_tag", value):
        return
    root = _parse(name, value)
    if not isinstance(root, dict):
        raise RequestError(f"{name} must be a JSON object, got {shown(root)}")
    expressions = {"pattern": regex, "grammar": ebnf}
    count = 0  # of expressions, grammars and repeats
    found: list[tuple[Any, bool]] = [(root, False)]  # parts, and whether they are inside of a repeated one
    while found:
        node, repeated = found.pop()
        if isinstance(node, dict) and node.get("type") in _REPEATED_PARTS:
            if repeated and not limits.of_tools:
                raise RequestError(f"{name}: a repeated part may not hold another one")
            repeated = True
            most = node.get("max")
            count += most if isinstance(most, int) and most > 0 else 1
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            if key in ("schema", "json_schema") and isinstance(item, dict):
                _Schema(f"{name}.{key}", item, limits.grammar_budget).check()
            elif key in expressions and isinstance(item, str):
                expressions[key](f"{name}.{key}", item, limits)
                count += 1
            elif isinstance(item, dict | list):
                found.append((item, repeated))
    if count > MAX_PLACES and not limits.of_tools:
        raise RequestError(
            f"{name} may hold at most {MAX_PLACES} expressions, grammars and repeated parts, got {count}"
        )


def regex(name: str, value: Any, limits: Limits) -> None:
    """A regular expression that the output matches as a whole."""
    _text(name, value, limits)
    if limits.grammar_budget.is_new("regex", value):
        _require_matchable(name, value, limits.grammar_budget)


def ebnf(name: str, value: Any, limits: Limits) -> None:
    """A grammar in EBNF; its rules may be recursive, its counted repeats may not explode.

    One that SGLang made of tools is not judged: nothing in it is a client's but texts, and written out it
    would be too large.
    """
    if limits.of_tools:
        return
    _text(name, value, limits)
    if value == "" or not limits.grammar_budget.is_new("ebnf", value):
        return
    for depth in (2, 1):
        with suppress(TooLargeError):  # rules that use each other several times grow fast
            _require_matchable(name, as_regex(name, value, depth), limits.grammar_budget)
            return
    _require_matchable(name, as_regex(name, value, depth=1, lists=True), limits.grammar_budget)


def stop_regex(name: str, value: Any, limits: Limits) -> None:
    """Regular expressions after whose match generation stops, of a kind that is matched fast.

    Python's matcher tries every way in which repeats and alternatives can share out the text: for
    ``(a+)+`` or ``(a|a)*`` exponentially many. So they must be few in all, and end.
    """
    one_or_list(_stop_text, MAX_STOPS)(name, value, limits)
    if not limits.grammar_budget.is_new("stop_regex", repr(value)):
        return
    ways = 0

    def check(name: str, value: Any, limits: Limits) -> None:
        nonlocal ways
        try:
            ways += _ways(name, regex_parser.parse(value))
        except (re.error, OverflowError, RecursionError) as error:
            raise RequestError(f"{name} is not a valid regular expression: {error}") from None

    one_or_list(check, MAX_STOPS)(name, value, limits)
    if ways > MAX_STOP_WAYS:
        raise RequestError(
            f"{name} may try at most {MAX_STOP_WAYS} ways to match at one place, got {shown(ways)}; give its "
            "repeats small upper bounds, as in [0-9]{1,20}"
        )


def _ways(name: str, pattern: Any) -> int:
    """Ways in which a pattern can match at one place, at most. Raises RequestError for what has no bound."""
    ways = 1
    for operator, argument in pattern:
        if operator in REPEATS:
            low, high, body = argument
            if high == UNBOUNDED:
                raise RequestError(f"{name}: * and + have no bound; write {{0,50}} or {{1,50}}")
            if high > 1 and (len(body) != 1 or body[0][0] not in SINGLE):
                raise RequestError(f"{name} may repeat single characters and classes, not groups")
            ways *= (high - low + 1) * _ways(name, body)
        elif operator is regex_parser.BRANCH:
            ways *= sum(_ways(name, branch) for branch in argument[1])
        elif operator is regex_parser.SUBPATTERN:
            ways *= _ways(name, argument[3])
        elif operator not in SINGLE and operator is not regex_parser.AT:
            raise RequestError(f"{name} may not hold look-around, conditions or back-references")
    return ways


def _parse(name: str, value: str) -> Any:
    """JSON that is nested at most ``MAX_GRAMMAR_DEPTH`` levels deep."""
    try:
        root = json.loads(value)
    except ValueError as error:
        raise RequestError(f"{name} must be JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"{name} may be nested at most {MAX_GRAMMAR_DEPTH} levels deep") from None
    level = [[root]]
    for _ in range(MAX_GRAMMAR_DEPTH + 1):
        level = [part for outer in level for part in _parts(outer)]
    if level:
        raise RequestError(f"{name} may be nested at most {MAX_GRAMMAR_DEPTH} levels deep")
    return root


def _depth(expression: str) -> int:
    """Groups of an expression that are open at once, at most, however its classes are read."""
    deepest = 0
    for groups in _GROUPS:
        depth = 0
        for found in groups.finditer(expression):
            if found[1] is not None:
                depth += 1 if found[1] == "(" else -1
                deepest = max(deepest, depth)
    return deepest


def _require_matchable(name: str, expression: str, budget: GrammarBudget) -> int:
    """Terms of a regular expression that is neither too large nor too ambiguous. Raises RequestError."""
    if _depth(expression) > MAX_GRAMMAR_DEPTH:
        raise TooLargeError(f"{name} may be nested at most {MAX_GRAMMAR_DEPTH} levels deep")
    return require_few_ways(name, expression, budget)


def _parts(node: Any) -> list[Any]:
    """Objects and lists in a value of JSON."""
    values = node.values() if isinstance(node, dict) else node
    return [part for part in values if isinstance(part, dict | list)]


def _levels(below: dict[int, list[int]]) -> int:
    """Nodes of the longest way down a graph, at most: those that can reach each other count as if each lay
    below the other."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    place = {node: at for at, node in enumerate(below)}
    ways = [(place[node], place[inner]) for node, members in below.items() for inner in members]
    graph = csr_array(([1] * len(ways), tuple(zip(*ways, strict=True))), (len(below), len(below)))
    _, found = connected_components(graph, directed=True, connection="strong")
    circle: list[int] = found.tolist()
    size = Counter(circle)
    inside: dict[int, set[int]] = {at: set() for at in size}
    for outer, inner in ways:
        if circle[inner] != circle[outer]:
            inside[circle[outer]].add(circle[inner])
    levels: dict[int, int] = {}
    for at in TopologicalSorter(inside).static_order():
        levels[at] = size[at] + max((levels[inner] for inner in inside[at]), default=0)
    return max(levels.values())


class _Schema:
    """One walk over a schema and over all that it refers to. What is said of one and the same value (by
    references and choices) must not lead back to itself: nothing would be said. Values may hold values of
    their own kind, as in trees."""

    def __init__(self, name: str, root: Any, budget: GrammarBudget) -> None:
        self.name, self.root, self._budget = name, root, budget
        self._open: set[int] = set()  # schemas of the value at hand that the walk is inside of, by identity
        self._done: set[int] = set()
        self._waiting: list[Any] = []  # schemas of other values
        self._below: dict[int, list[int]] = {}  # schemas in a schema, by identity
        self._terms = 0  # of all patterns

    def check(self) -> None:
        if not isinstance(self.root, dict | bool):
            raise RequestError(f"{self.name} must be a JSON schema, an object, got {shown(self.root)}")
        self._waiting = [self.root]
        while self._waiting:
            self._walk(self._waiting.pop(), 0)
        if len(self._below) > MAX_SCHEMA_LEVELS and _levels(self._below) > MAX_SCHEMA_LEVELS:
            raise RequestError(
                f"{self.name} may lead at most {MAX_SCHEMA_LEVELS} schemas deep, its references followed"
            )

    def _walk(self, node: Any, depth: int) -> None:
        """``node`` and what it says of the same value."""
        if not isinstance(node, dict | list) or id(node) in self._done:
            return
        if depth > 4 * MAX_GRAMMAR_DEPTH:
            raise RequestError(f"{self.name} may follow at most {4 * MAX_GRAMMAR_DEPTH} levels of references")
        if id(node) in self._open:
            raise RequestError(
                f"{self.name}: a $ref leads back to itself before it says what a value is; a schema may "
                "refer to itself only inside properties or items"
            )
        self._open.add(id(node))
        self._budget.spend(SCHEMA)
        if isinstance(node, dict):
            self._check_counts(node)
        same, inner = self._members(node)
        self._below[id(node)] = [*map(id, same), *map(id, inner)]
        self._waiting += inner
        for part in same:
            self._walk(part, depth + 1)
        self._open.discard(id(node))
        self._done.add(id(node))

    def _members(self, node: dict[str, Any] | list[Any]) -> tuple[list[Any], list[Any]]:
        """Schemas, and lists of them, in ``node``: of the same value, and of values inside of it."""
        if isinstance(node, list):
            return _parts(node), []
        same: list[Any] = []
        inner: list[Any] = []
        for key, item in node.items():
            if key in _BY_NAME and isinstance(item, dict):
                inner += _parts(item)
            elif key not in _NO_SCHEMAS and isinstance(item, dict | list):
                (same if key in _SAME_VALUE else inner).append(item)
        references = [node[key] for key in _REFERENCES & node.keys()]
        targets = [self._target(text) for text in references if not isinstance(text, dict | list)]
        return same + [target for target in targets if isinstance(target, dict | list)], inner

    def _check_counts(self, node: dict[str, Any]) -> None:
        for key in _COUNTS:
            count = node.get(key)
            if isinstance(count, int | float) and not 0 <= count <= INT64_MAX:
                raise RequestError(f"{self.name}: {key} must be from 0 to 2^63 - 1, got {shown(count)}")
        properties = node.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_SCHEMA_PROPERTIES:
            raise RequestError(
                f"{self.name}: an object may have at most {MAX_SCHEMA_PROPERTIES} properties, "
                f"got {len(properties)}"
            )
        for key in _CHOICES:
            ways = node.get(key)
            if isinstance(ways, list) and sum(map(self._is_open, ways)) > MAX_PLACES:
                raise RequestError(
                    f"{self.name}: {key} may offer at most {MAX_PLACES} choices that are neither objects nor "
                    f"constants, got {len(ways)}"
                )
        if isinstance(node.get("pattern"), str):
            self._add_pattern("pattern", node["pattern"])
        if isinstance(node.get("patternProperties"), dict):
            for key in node["patternProperties"]:
                self._add_pattern("patternProperties", key)

    def _is_open(self, choice: Any) -> bool:
        """Whether a schema among several allows text that others may begin with, too."""
        if not isinstance(choice, dict):
            return True
        if "$ref" in choice:
            choice = self._target(choice["$ref"])
            if not isinstance(choice, dict):
                return True
        is_object = "properties" in choice and choice.get("type", "object") == "object"
        return not (is_object or choice.keys() & {"const", "enum"})

    def _add_pattern(self, key: str, expression: str) -> None:
        self._terms += _require_matchable(f"{self.name}: {key}", expression, self._budget)
        if self._terms > MAX_GRAMMAR_SIZE:
            raise RequestError(
                f"{self.name}: its patterns may have at most {MAX_GRAMMAR_SIZE} terms in all, once their "
                "counted repeats are written out"
            )

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

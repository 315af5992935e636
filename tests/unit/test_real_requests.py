"""Structured output as real clients ask for it: all of it passes, and is judged in less than half a second.

Other fields are tested against a server, in ``tests/clients/test_real_requests.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from sglang.srt.entrypoints.openai.protocol import Function, Tool, ToolChoice, ToolChoiceFuncName
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar import GrammarCompiler, TokenizerInfo

from adaserve.boundary import Limits, RequestError, check_request
from adaserve.boundary.limits import MAX_SCHEMA_LEVELS

# ruff: noqa: E501 - tables read better with one case a line
LIMITS = Limits(vocab_size=128_256)


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=80)
    code: str = Field(pattern=r"^[A-Z]{3}-\d{4}$")


class Node(BaseModel):
    """A tree."""

    text: str
    children: list[Node] = Field(max_length=10)


class Linked(BaseModel):
    value: float
    next: Linked | None


class Order(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tags: dict[str, list[str]]
    colour: Colour | None = None
    lines: list[tuple[int, str]] = Field(min_length=1, max_length=100_000)
    note: str | None = Field(default=None, max_length=65_535)
    tree: Node


def action(i: int) -> type[BaseModel]:
    return type(f"Action{i}", (BaseModel,), {"__annotations__": {f"argument_{i}": str, "count": int}})


def union_of_references(count: int) -> dict[str, Any]:
    """Choices of an agent, each with its own model."""
    defs = {f"Action{i}": action(i).model_json_schema() for i in range(count)}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in defs], "$defs": defs}


def tools(count: int) -> dict[str, Any]:
    """What SGLang makes of ``tool_choice="required"``, with the descriptions that MCP servers send."""
    parameters = {
        "type": "object", "required": ["owner", "repo"],
        "properties": {
            **{name: {"type": "string", "description": "Where to look. (see the manual " * 9} for name in ("owner", "repo")},
            "page": {"type": "number", "minimum": 1}, "labels": {"type": "array", "items": {"type": "string"}},
            "state": {"enum": ["open", "closed", "all"], "type": "string"},
        },
    }  # fmt: skip
    calls = [{"properties": {"name": {"type": "string", "enum": [f"tool_{i}"]}, "parameters": parameters},
              "required": ["name", "parameters"]} for i in range(count)]  # fmt: skip
    return {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}


UI = {
    "type": "object", "required": ["type", "label", "children"], "additionalProperties": False,
    "properties": {
        "type": {"type": "string", "enum": ["div", "button", "header"]}, "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
}  # fmt: skip
"""A value that holds values of its own kind, as in the documentation of OpenAI's API."""

SCHEMAS: dict[str, Any] = {
    "an order": Order.model_json_schema(),
    "a tree": Node.model_json_schema(),
    "a linked list": Linked.model_json_schema(),
    "a user interface": UI,
    "rules inside of rules": {"$ref": "#/definitions/rule", "definitions": {"rule": {"anyOf": [
        {"type": "string"}, {"type": "object", "properties": {"all": {"type": "array", "items": {"$ref": "#/definitions/rule"}}}},
    ]}}},
    "40 actions": union_of_references(40),
    "120 tools": tools(120),
    "a text column of SQL": {"type": "string", "maxLength": 4_294_967_295},
    "a list of any length": {"type": "array", "items": {"type": "number"}, "maxItems": 9_007_199_254_740_991},
    "a schema for schemas": {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}},
                             "default": {"pattern": "(?!x)", "$ref": "nowhere"}},
}  # fmt: skip

COUNTRIES = "(" + "|".join(a + b + c for a in "ABC" for b in "DEFGHIJK" for c in "LMNOP") + ")"
REGEXES = [
    COUNTRIES,
    "(" + "|".join(f"answer number {i}" for i in range(500)) + ")",
    r"^[A-Z]{2}[0-9]{2}(?: ?[0-9A-Z]{4}){2,6}? ?[0-9A-Z]{0,4}$",  # IBAN
    r"^(https?:\/\/)?([\da-z\.-]+)\.([a-z\.]{2,6})([\/\w \.-]*)*\/?$",
    r"^u?int(8|16|24|32|40|48|56|64|72|80|88|96|104|112|120|128|136|144|152|160|168|176|184|192|200|208|216|224"
    r"|232|240|248|256)?(\[[0-9]*\])*$",
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
    r"(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",  # semver
    r"^((25[0-5]|2[0-4]\d|1?\d?\d)(\.|$)){4}",
    r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    r"^[a-zA-Z0-9.!#$%&'*+\/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$",  # HTML's own for addresses
    r"\d{1,3}(,\d{3})*(\.\d+)?",
    r"(([a-z]+ )+[a-z]+\. )+",
    r"^(\/?((\.{2})|([a-z0-9\-]*))($|\/))*$",
    r"^,?(((C-CLOSED|O-OPEN|O-PENDING),?)*)+$",
]  # fmt: skip


EBNFS = {
    "a game of chess": r"""
        root ::= ([1-9] [0-9]? ". " ply " " ply "\n")+
        ply  ::= (figure | pawn | "O-O" "-O"?) [+#]?
        figure ::= [KQRBN] [a-h]? [1-8]? "x"? square
        pawn ::= ([a-h] "x")? square ("=" [QRBN])?
        square ::= [a-h] [1-8]""",
    "SQL": r"""
        root   ::= query ";"
        query  ::= "SELECT " ("DISTINCT ")? ("*" | item (", " item)*) " FROM " source join* where? group? order? limit?
        item   ::= (name ".")? name | ("COUNT" | "SUM" | "AVG" | "MIN" | "MAX") "(" ("*" | name) ")" (" AS " name)?
        source ::= name (" AS " name)? | "(" query ")"
        join   ::= (" INNER" | " LEFT" | " RIGHT")? " JOIN " source " ON " test
        where  ::= " WHERE " test
        test   ::= term ((" AND " | " OR ") term)*
        term   ::= "NOT "? value " "? ("=" | "<>" | "<" | "<=" | ">" | ">=" | "LIKE" | "IN") " "? value | "(" test ")"
        value  ::= item | "-"? [0-9]+ ("." [0-9]+)? | "'" [^']* "'" | "(" query ")"
        group  ::= " GROUP BY " item (", " item)* (" HAVING " test)?
        order  ::= " ORDER BY " item (" ASC" | " DESC")? (", " item (" ASC" | " DESC")?)*
        limit  ::= " LIMIT " [0-9]+
        name   ::= [a-zA-Z_] [a-zA-Z0-9_]*""",
    "a subset of C": r"""
        root ::= function*
        function ::= type name "(" (type name)? ") {\n" statement* "}\n"
        type ::= "int " | "float " | "char "
        statement ::= type name " = " sum ";\n" | name " = " sum ";\n" | name "(" arguments? ");\n" | "return " sum ";\n"
            | "while (" test ") {\n" statement* "}\n" | "if (" test ") {\n" statement* "}" (" else {\n" statement* "}")? "\n"
            | "//" [^\n]* "\n" | "/*" ([^*] | "*" [^/])* "*/"
        test ::= sum (" < " | " <= " | " > " | " >= " | " == " | " != ") sum
        sum ::= product ((" + " | " - ") product)*
        product ::= factor ((" * " | " / ") factor)*
        factor ::= name | [0-9]+ | "-" factor | name "(" arguments? ")" | "(" sum ")"
        arguments ::= sum (", " sum)*
        name ::= [a-zA-Z_] [a-zA-Z_0-9]*""",
    "a subset of Python": r"""
        root ::= statement+
        statement ::= (name " = " value | "return " value | "pass" | value | "import " name ("." name)*) "\n"
            | "if " value ":\n" block ("elif " value ":\n" block)* ("else:\n" block)? | "for " name " in " value ":\n" block
            | "while " value ":\n" block | "def " name "(" (name (", " name)*)? "):\n" block
        block ::= ("    " statement)+
        value ::= either (" if " either " else " value)? | "lambda " name ": " value
        either ::= both (" or " both)*
        both ::= negated (" and " negated)*
        negated ::= "not " negated | compared
        compared ::= sum ((" < " | " > " | " == " | " != " | " <= " | " >= " | " in " | " is ") sum)*
        sum ::= product ((" + " | " - ") product)*
        product ::= factor ((" * " | " / " | " % " | " // ") factor)*
        factor ::= ("+" | "-" | "~") factor | part (" ** " factor)?
        part ::= atom ("(" (value (", " value)*)? ")" | "[" value "]" | "." name)*
        atom ::= "(" value ")" | "[" (value (", " value)*)? "]" | "{" (value ": " value (", " value ": " value)*)? "}"
            | name | [0-9]+ ("." [0-9]*)? | "\"" [^"\n]* "\"" | "'" [^'\n]* "'" | "None" | "True" | "False"
        name ::= [a-zA-Z_] [a-zA-Z_0-9]*""",
    "JSON with blanks that recur": r"""
        root ::= value
        value ::= (object | array | string | number | "true" | "false" | "null") ws
        object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
        array ::= "[" ws (value ("," ws value)*)? "]"
        string ::= "\"" ([^"\\] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
        number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
        ws ::= ([ \t\n] ws)?""",
    "XML": r"""
        root ::= "<" name (" " name "=\"" [^"<&]* "\"")* ("/>" | ">" ([^<&]+ | root)* "</" name ">")
        name ::= [a-zA-Z_:] [a-zA-Z0-9_:.-]*""",
    "calls of Python": r"""
        root ::= (call "\n")+
        call ::= name "(" (name "=" value (", " name "=" value)*)? ")"
        value ::= "'" [^'\n]* "'" | "-"? [0-9]+ | "[" (value (", " value)*)? "]" | "None" | "True" | "False"
        name ::= [a-z_] [a-z0-9_]*""",
    "any text first": 'root ::= "<think>" [^]* "</think>" [a-z]+',
    "Japanese": "root ::= char+ ([ 、。] char+)*\nchar ::= [ぁ-ゟ] | [ァ-ヿ] | [\\u4e00-\\u9fff]",
}  # fmt: skip


def judge(params: dict[str, Any], **limits: Any) -> None:
    """Raises RequestError, also where it takes much effort: everybody else waits meanwhile."""
    check_request({"text": "a", "sampling_params": params}, replace(LIMITS, **limits))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_real_clients_pass(name: str) -> None:
    judge({"json_schema": json.dumps(SCHEMAS[name])})


@pytest.mark.parametrize("expression", REGEXES)
def test_expressions_of_real_clients_pass(expression: str) -> None:
    judge({"regex": expression})
    judge({"json_schema": json.dumps({"type": "string", "pattern": expression})})


@pytest.mark.parametrize("name", EBNFS)
def test_grammars_of_real_clients_pass(name: str) -> None:
    judge({"ebnf": EBNFS[name]})


def tool(i: int, **more: Any) -> Tool:
    """Of an MCP server."""
    schema = tools(1)["items"]["anyOf"][0]["properties"]["parameters"] | {"additionalProperties": False}
    return Tool(
        function=Function(name=f"tool_{i}", description="Where to look. " * 20, parameters=schema, **more)
    )


PARSERS = sorted(
    FunctionCallParser.ToolCallParserEnum.keys() - {"response_template"}
)  # needs a model's template


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("count", [1, 117])
def test_what_sglang_makes_of_tools_passes(parser: str, count: int) -> None:
    for strict in (True, None):
        parsing = FunctionCallParser([tool(i, strict=strict) for i in range(count)], parser)
        for choice in ("auto", "required", ToolChoice(function=ToolChoiceFuncName(name="tool_0"))):
            made = parsing.get_structure_constraint(choice, thinking_mode=True)
            if made is not None:
                kind, value = made[0].removeprefix("full_assistant_"), made[1]
                text = (
                    value
                    if isinstance(value, str)
                    else json.dumps(
                        value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
                    )
                )
                judge({kind: text}, of_tools=True)


def test_the_schemas_of_tools_are_judged_all_the_same() -> None:
    bad = Tool(
        function=Function(
            name="bad", strict=True, parameters={"type": "object", "properties": {"a": {"$ref": "http://x"}}}
        )
    )
    made = FunctionCallParser([bad], "hermes").get_structure_constraint("required")
    assert made is not None and made[0] == "structural_tag"
    with pytest.raises(RequestError, match="must be # or start with #/"):
        judge({"structural_tag": made[1].model_dump_json(by_alias=True)}, of_tools=True)


def test_thirty_such_expressions_fit_into_one_request() -> None:
    expressions = [f"([a-z]+,){{1,200}}{i}" for i in range(30)]
    check_request({"text": ["a"] * 30, "sampling_params": [{"regex": e} for e in expressions]}, LIMITS)


@pytest.mark.parametrize(
    "expression",
    ["(([a-z]+)+)+", "(([a-z]+)*)*", "(([a-z]?)+)+", r"((\w+ ?)+)+", "(([a-z]+)+|x)+", "(([a-z]+)+){1,9}", "(([a-z]+,?)*[a-z]*)+"],
)  # fmt: skip
def test_repeats_of_repeats_are_refused(expression: str) -> None:
    """After a few hundred characters, one step of these takes xgrammar a tenth of a second."""
    with pytest.raises(RequestError, match="too many ways"):
        judge({"regex": expression})


def chain(length: int) -> dict[str, Any]:
    """Objects one in the other, but as text side by side; three schemas (or lists of them) for each."""
    defs = {str(i): {"properties": {"a": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]}}} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(length): {"type": "string"}}}


def test_what_compiles_by_recursion_does_not_lead_too_deep() -> None:
    """xgrammar's thread has a stack of 8 MB; where it ends, the server does."""
    deepest = chain((MAX_SCHEMA_LEVELS - 2) // 4)
    judge({"json_schema": json.dumps(deepest)})
    GrammarCompiler(TokenizerInfo(["a"]), max_threads=1).compile_json_schema(json.dumps(deepest))
    with pytest.raises(RequestError, match="1000 schemas deep"):
        judge({"json_schema": json.dumps(chain(MAX_SCHEMA_LEVELS // 4 + 1))})
    with pytest.raises(RequestError, match="1000 schemas deep"):  # in a circle, and with ways past it
        circle: dict[str, Any] = {
            str(i): {
                "properties": {"a": {"$ref": f"#/$defs/{max(0, i - 1)}"}, "z": {"$ref": f"#/$defs/{i + 1}"}}
            }
            for i in range(500)
        }
        judge({"json_schema": json.dumps({"$ref": "#/$defs/0", "$defs": circle | {"500": {}}})})


def test_a_wide_schema_is_not_deep() -> None:
    row = {"type": "object", "properties": {f"b{i}": {"$ref": "#/$defs/x"} for i in range(50)}}
    wide = {
        "type": "object",
        "properties": {f"a{i}": row for i in range(50)},
        "$defs": {"x": {"type": "null"}},
    }
    judge({"json_schema": json.dumps(wide)})

"""Requests whose answers repeat what the text already says, made of the held-out text that ships.

They are what retrieval drafts are for: edits of a file, turns that quote what was said before, requests
that fill one template, and facts drawn from a passage as JSON.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from adaserve.bench.client import Ask
from adaserve.pair.prompts import Prompt, load_prompts

_NAME = re.compile(r"\b[a-z_]{5,}\b")
_SENTENCE = re.compile(r"[A-Z][^\n.]{40,160}\.(?=\s)")


def _edit(code: Prompt, _: Prompt, rng: random.Random) -> str:
    """A file, and its first lines again under a new name."""
    lines = code.text.rstrip().splitlines()
    given = "\n".join(lines[: max(2, len(lines) // 4)])
    names = _NAME.findall(given)
    old = rng.choice(names) if names else given[:4]
    renamed = given.replace(old, f"{old}_2")
    return f"# before\n\n{code.text.rstrip()}\n\n# after: {old} is now {old}_2\n\n{renamed}\n"


def _turns(_: Prompt, passage: Prompt, rng: random.Random) -> str:
    """A conversation about a passage whose answers quote it; the last answer begins with its first words."""
    text = passage.text.removesuffix("\n\nIn summary,")[:1800]
    sentences = _SENTENCE.findall(text) or [text[:120]]
    said = rng.sample(sentences, min(3, len(sentences)))
    turns = [f"User: what does it say, word for word?\nAssistant: {sentence}\n" for sentence in said]
    again = rng.choice(said).split()
    return f"{text}\n\n{''.join(turns)}User: say that again\nAssistant: {' '.join(again[:3])}"


def _template(code: Prompt, _: Prompt, rng: random.Random) -> str:
    """A form with one field that differs."""
    name = rng.choice(_NAME.findall(code.text) or ["value"])
    filled = "".join(
        f"Name: {other}\nKind: function\nStatus: documented\nOwner: the library team\nReview: every year\n\n"
        for other in ("open", "close", "read")
    )
    return f"{filled}Name: {name}\nKind:"


def _json(_: Prompt, passage: Prompt, rng: random.Random) -> str:
    return f"{passage.text[: rng.randint(600, 1200)]}\n\nThe same as JSON:\n"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "language": {"enum": ["English", "German", "French"]},
        "contains_code": {"type": "boolean"},
        "sections": {
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "heading": {"type": "string", "maxLength": 24},
                    "importance": {"type": "integer"},
                },
                "required": ["heading", "importance"],
            },
        },
    },
    "required": ["title", "language", "contains_code", "sections"],
}

KINDS: dict[str, Callable[[Prompt, Prompt, random.Random], str]] = {
    "edits": _edit,
    "turns": _turns,
    "templates": _template,
    "json": _json,
}
OF_CLASS = {"coding": "edits", "chat": "turns", "summarization": "templates"}
"""Class -> kind of its requests, in a load test whose text all repeats itself."""


def repetitive(kinds: Sequence[str], count: int, seed: int = 0) -> list[Ask]:
    """``count`` requests, the kinds in turn; the same ``seed`` gives the same. Kinds: keys of ``KINDS``."""
    rng = random.Random(seed)
    code = [p for p in load_prompts("coding") if p.tokens >= 100]
    passages = load_prompts("summarization")
    return [
        Ask(
            KINDS[kind](rng.choice(code), rng.choice(passages), rng),
            tokens=0,
            json_schema=json.dumps(SCHEMA) if kind == "json" else None,
        )
        for kind in (kinds[i % len(kinds)] for i in range(count))
    ]

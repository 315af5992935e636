"""Real prompts, cut to the lengths that a schedule asks for.

Acceptance of speculated tokens depends on the text, so prompts are text that people wrote. Source:
a JSONL (or .jsonl.gz) file of ``{"category": ..., "text": ...}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

import numpy as np

from adaserve.host.files import UNREADABLE, json_lines, not_utf8, read_text, why_unreadable
from adaserve.loadgen.errors import LoadgenError

CHARS_PER_TOKEN = 3.5
"""When neither a tokenizer nor a measurement is at hand. Large vocabularies: about 4."""


class Tokenizer(Protocol):
    """What a Hugging Face tokenizer offers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class PromptStore:
    """Texts by category."""

    texts: Mapping[str, Sequence[str]]
    source: str
    chars_per_token: Mapping[str, float]  # measured per category; CHARS_PER_TOKEN if missing
    tokenizer: Tokenizer | None = None

    def get(self, category: str, n_tokens: int, key: str) -> str:
        """A prompt of about ``n_tokens`` tokens; the same ``key`` gives the same text.

        Unknown categories use all texts."""
        pool = self.texts.get(category) or [t for texts in self.texts.values() for t in texts]
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        rng = np.random.default_rng(seed)
        if self.tokenizer is not None:
            text = _gather(pool, n_tokens * 8, rng)
            # What a tokenizer begins texts with, such as <s>, is counted, but not sent: servers add it.
            own = len(self.tokenizer.encode(""))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            return self.tokenizer.decode(ids[: max(1, n_tokens - own)])
        n_chars = max(1, round(n_tokens * self.chars_per_token.get(category, CHARS_PER_TOKEN)))
        return _cut(_gather(pool, n_chars, rng), n_chars)


def _gather(pool: Sequence[str], n_chars: int, rng: np.random.Generator) -> str:
    """At least ``n_chars`` of text: one entry, from a random line on when it is much longer."""
    text = pool[int(rng.integers(len(pool)))]
    if len(text) > 2 * n_chars:
        start = text.rfind("\n", 0, int(rng.integers(len(text) - n_chars))) + 1
        return text[start:]
    parts = [text]
    size = len(text)
    while size < n_chars:
        parts.append(pool[int(rng.integers(len(pool)))])
        size += len(parts[-1]) + 2
    return "\n\n".join(parts)


def _cut(text: str, n_chars: int) -> str:
    """The first ``n_chars``, without half a word at the end when a word ends nearby."""
    if len(text) <= n_chars:
        return text
    end = max(text.rfind(" ", 0, n_chars), text.rfind("\n", 0, n_chars))
    return text[: end if end > 0.9 * n_chars else n_chars]


def load_prompts(
    path: str | Path | None = None,
    chars_per_token: Mapping[str, float] | None = None,
    tokenizer: Tokenizer | None = None,
) -> PromptStore:
    """Reads a prompt file; None = the held-out prompts that ship with the embedded pair."""
    # A file of the package: importing adaserve.pair would load torch.
    shipped = resources.files("adaserve") / "pair" / "prompts.jsonl.gz"
    found = Path(str(shipped if path is None else path))
    try:
        text = read_text(found)
    except UNREADABLE as e:
        raise LoadgenError(f"cannot read the prompts in {found}: {why_unreadable(e)}") from e
    texts: dict[str, list[str]] = {}
    for number, line in enumerate(json_lines(text), 1):
        if line.strip():
            category, prompt = _parse(line, f"{found}:{number}")
            texts.setdefault(category, []).append(prompt)
    if not texts:
        raise LoadgenError(f"{found} holds no prompts")
    return PromptStore(texts, str(found), chars_per_token or {}, tokenizer)


def _parse(line: str, where: str) -> tuple[str, str]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise LoadgenError(f"{where}: not a JSON object: {e}") from e
    if not isinstance(data, dict) or not isinstance(data.get("text"), str) or not data["text"].strip():
        raise LoadgenError(f'{where}: expected {{"category": "coding", "text": "..."}} with some text')
    if (odd := not_utf8(data["text"])) is not None:
        raise LoadgenError(f"{where}: text holds {odd!r}, not a character of UTF-8")
    return str(data.get("category", "")), data["text"]

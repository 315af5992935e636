"""Held-out real text as prompts for load tests and demos, in three categories; and whether text loops.

coding: the beginning of a function, class or module. chat: a heading of a manual, often a question, sometimes
with the first sentence below it. summarization: a passage of a manual with a cue to sum it up.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer

from adaserve.pair.corpus import Document, read_documents
from adaserve.pair.tokenizer import load_tokenizer

CATEGORIES = ("coding", "chat", "summarization")
PER_CATEGORY = 400
SUMMARY_CUE = "\n\nIn summary,"
_DEFINITION = re.compile(r"^(?:    )?(?:async def|def|class) \w", re.M)
_HEADING = re.compile(r"^#{1,2} (.{8,90})\n\n(.+)$", re.M)
_FIRST_SENTENCE = re.compile(r"[A-Z][^\n]{30,220}?[.?:](?=\s|$)")


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str
    tokens: int  # in the embedded pair's vocabulary
    source: str
    path: str


def load_prompts(category: str | None = None) -> list[Prompt]:
    """The shipped prompts, all or those of one category, in a fixed order."""
    raw = gzip.decompress(files("adaserve.pair").joinpath("prompts.jsonl.gz").read_bytes())
    prompts = [Prompt(**json.loads(line)) for line in raw.decode().splitlines()]
    return [p for p in prompts if category in (None, p.category)]


def distinct_share(tokens: Sequence[int]) -> float:
    """Share of the 8-grams of a continuation that are distinct, low if it loops; 1 for shorter ones."""
    grams = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _coding(document: Document, rng: random.Random) -> Iterator[str]:
    """From a definition (or the top of the file) to some line end 200 to 1,000 characters later."""
    starts = [0, *(m.start() for m in _DEFINITION.finditer(document.text))]
    for start in rng.sample(starts, min(len(starts), 8)):
        end = document.text.find("\n", start + rng.randint(200, 1000))
        if end > 0:
            yield document.text[start : end + 1]


def _chat(document: Document, rng: random.Random) -> Iterator[str]:
    for match in _HEADING.finditer(document.text):
        heading, body = match.groups()
        if heading.count("`") > 2 or not heading[0].isalpha() or " " not in heading:
            continue
        sentence = _FIRST_SENTENCE.match(body)
        wants_sentence = "?" not in heading and rng.random() < 0.6
        yield f"# {heading}\n\n" + (f"{sentence.group()} " if wants_sentence and sentence else "")


def _is_plain(paragraph: str) -> bool:
    letters = sum(c.isalpha() or c in " ,." for c in paragraph)
    return letters > 0.9 * len(paragraph) and not paragraph.startswith("    ") and "```" not in paragraph


def _summarization(document: Document, rng: random.Random) -> Iterator[str]:
    """Paragraphs of mostly plain sentences in their order, 1,200 to 3,200 characters together."""
    taken: list[str] = []
    wanted = rng.randint(1200, 3200)
    for paragraph in document.text.split("\n\n"):
        if _is_plain(paragraph):
            taken.append(paragraph)
        if sum(map(len, taken)) > wanted:
            yield "\n\n".join(taken) + SUMMARY_CUE
            taken, wanted = [], rng.randint(1200, 3200)


_MAKERS = {
    "coding": ("code", _coding, (50, 300)),
    "chat": ("prose", _chat, (5, 80)),
    "summarization": ("prose", _summarization, (300, 900)),
}


def cut_prompts(documents: list[Document], tokenizer: Tokenizer, *, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for category, (kind, make, (low, high)) in _MAKERS.items():
        found: dict[str, Prompt] = {}
        for document in (d for d in documents if d.kind == kind):
            # A token takes the blank before it, so a blank at the end would stand where none ever did.
            for text in map(str.rstrip, make(document, rng)):
                tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
                if low <= tokens <= high:
                    found[text] = Prompt(category, text, tokens, document.source, document.path)
        prompts += rng.sample(list(found.values()), min(len(found), PER_CATEGORY))
    return prompts


def write_prompts(corpus: Path, out: Path, *, seed: int) -> None:
    """Cuts prompts from the corpus' held-out documents into `out`."""
    prompts = cut_prompts(read_documents(corpus / "held_out.jsonl"), load_tokenizer(corpus), seed=seed)
    lines = "".join(json.dumps(asdict(p)) + "\n" for p in prompts)
    out.write_bytes(gzip.compress(lines.encode(), mtime=0))

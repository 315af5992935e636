"""Turns documentation and source files into training text: markup that says nothing is removed.

All documentation gets one light, Markdown-like form, because a model of a few million parameters has no
capacity to spare for four ways of underlining a heading.
"""

from __future__ import annotations

import re

_ROLE = re.compile(r"(?::[\w.+-]+)+:`([^`]*)`")
_TARGET = re.compile(r"^([^<`]*?)\s*<[^<>]*>$", re.S)
_LINK = re.compile(r"`([^`<]+?)\s*<[^>]+>`__?")
_LINE_NOISE = re.compile(
    r"^\s*(?:\.\.\s+_[^:]*:.*|\.\.\s+\|.*|:[\w -]+:(?:\s.*)?|\.\.\s+(?:index|module|currentmodule|py:module|"
    r"versionadded|versionchanged|versionmodified|highlight|contents|toctree|include|literalinclude|image|"
    r"autoclass|automodule|autofunction|automethod|autoattribute|autodata|autoexception|autosummary|tags|"
    r"meta|only|container|rubric|default-domain|py:currentmodule|sectionauthor|moduleauthor|ticket|change|"
    r"_[\w-]+)\b.*|\.\.\s*|__\s+\S+)$"
)
_ADMONITION = re.compile(
    r"^(\s*)\.\.\s+(note|warning|tip|seealso|important|caution|hint|admonition|deprecated)::\s*(.*)$"
)
_CODE_BLOCK = re.compile(
    r"^\s*\.\.\s+(?:code-block|sourcecode|code|console|parsed-literal|ipython|plot|testcode)::.*$"
)
_SIGNATURE = re.compile(r"^(\s*)\.\.\s+(?:[\w:-]+)::\s*(.*)$")
_UNDERLINE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_TABLE_RULE = re.compile(r"^\s*[=+|-][=+| -]{3,}$")
_ITEM = re.compile(r"^(?:[*+-]|#\.|\d+[.)])\s+")
_LICENSE_WORDS = re.compile(r"copyright|licen[cs]e|all rights reserved|spdx|-\*-|vim:|^#!", re.I)
_LICENSE_DOCSTRING = re.compile(
    r'^\s*r?"""(?:(?!""").)*?(?:hereby granted|Apache License|[Rr]edistribution)(?:(?!""").)*"""', re.S
)
_REFERENCE = re.compile(r"^(?:\s*\.\. \[[^\]]+\]\s*)?\s*(?:[*-]\s+)?(?:<)?https?://\S+$")
_DATE_LINE = re.compile(r"^\s*(?:Copyright|\(c\)|©)", re.I)


def _role(match: re.Match[str]) -> str:
    inner = " ".join(match.group(1).split())
    target = _TARGET.match(inner)
    if target and target.group(1):
        return target.group(1)
    return (
        "`" + inner.lstrip("~!").rsplit(".", 1)[-1] + "`"
        if inner.startswith("~")
        else f"`{inner.lstrip('!')}`"
    )


def _inline(text: str) -> str:
    text = _ROLE.sub(_role, text)
    text = _LINK.sub(r"\1", text)
    text = text.replace("``", "`")
    text = re.sub(r"`_{1,2}(?!\w)", "`", text)
    return re.sub(r"\b([A-Z][A-Za-z]+)_(?=[\s.,;:)])", r"\1", text)


def rst_to_text(text: str) -> str:
    """reStructuredText without labels, options and cross-reference syntax; headings become `# ...`."""
    lines = _inline(text.expandtabs(4)).splitlines()
    out: list[str] = []
    for i, line in enumerate(lines):
        follower = lines[i + 1] if i + 1 < len(lines) else ""
        if _UNDERLINE.match(line) or _TABLE_RULE.match(line):
            continue
        if line.strip() and not line.startswith(" ") and _UNDERLINE.match(follower) and len(follower) > 2:
            out.append(("# " if follower[0] in "=#*" else "## ") + line.strip())
            continue
        out.extend(_rst_line(line))
    return "\n".join(out)


def _rst_line(line: str) -> list[str]:
    if _LINE_NOISE.match(line) or _CODE_BLOCK.match(line) or _REFERENCE.match(line):
        return []
    admonition = _ADMONITION.match(line)
    if admonition:
        title = {"seealso": "See also"}.get(admonition.group(2), admonition.group(2).capitalize())
        return [f"{admonition.group(1)}{title}: {admonition.group(3)}".rstrip()]
    signature = _SIGNATURE.match(line)
    if signature:
        return [signature.group(1) + signature.group(2)] if signature.group(2) else []
    line = line.rstrip()
    return [line[:-1] if line.endswith("::") else line]


def markdown_to_text(text: str) -> str:
    """Markdown without link targets, images and HTML."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\[[^\]]+\]:.*$", "", text, flags=re.M)
    return re.sub(r"</?[a-zA-Z][^>\n]*>", "", text)


def python_to_text(text: str) -> str:
    """Source without the license header, editor lines and byte-order mark."""
    lines = text.lstrip("\ufeff").expandtabs(4).splitlines()
    head = 0
    while head < len(lines) and (not lines[head].strip() or lines[head].startswith("#")):
        head += 1
    header = "\n".join(lines[:head])
    kept = lines[head:] if _LICENSE_WORDS.search(header) else lines
    text = "\n".join(line for line in kept if not _DATE_LINE.match(line.lstrip("# ")))
    return _LICENSE_DOCSTRING.sub("", text, count=1)


def unwrap(text: str) -> str:
    """Prose paragraphs as one line each: where a line was wrapped says nothing and cannot be predicted."""
    return "\n\n".join(_unwrap_block(block) for block in text.split("\n\n"))


def _unwrap_block(block: str) -> str:
    out: list[str] = []
    for line in block.split("\n"):
        previous = out[-1] if out else ""
        indent = len(line) - len(line.lstrip())
        starts_item = _ITEM.match(line.lstrip()) is not None
        joins = (
            len(previous.rsplit("\n", 1)[-1]) > 40
            and not previous.startswith(("#", ">", "$", "    "))
            and indent < 4
            and not starts_item
            and (indent == 0 or _ITEM.match(previous) is not None or previous.startswith(" " * indent))
            and _looks_like_prose(line)
        )
        if joins:
            out[-1] = f"{previous} {line.strip()}"
        else:
            out.append(line)
    return "\n".join(out)


def _looks_like_prose(line: str) -> bool:
    odd = sum(not (c.isalpha() or c in " ,.'-`\"()") for c in line)
    return odd <= 0.12 * len(line) and not line.lstrip().startswith(
        (">>>", "def ", "class ", "import ", "from ", "@")
    )


def tidy(text: str) -> str:
    """ASCII punctuation, no trailing blanks, at most one empty line (two would only teach layout)."""
    for old, new in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2013", "-"),
                     ("\u2014", "-"), ("\u2026", "..."), ("\u00a0", " ")):  # fmt: skip
        text = text.replace(old, new)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def is_worth_reading(text: str) -> bool:
    """False for tables of numbers, other alphabets, lists of names and very short files."""
    if len(text) < 400:
        return False
    letters = sum(c.isalpha() for c in text)
    digits = sum(c.isdigit() for c in text)
    foreign = sum(ord(c) > 127 for c in text)
    spaces = text.count(" ") + text.count("\n")
    longest = max(len(line) for line in text.splitlines())
    n = len(text)
    return (
        letters > 0.5 * n and digits < 0.06 * n and foreign < 0.01 * n and spaces > 0.1 * n and longest < 2000
    )

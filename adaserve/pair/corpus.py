"""Builds the training text from the interpreter's standard library and pinned source distributions.

Everything comes through `pip download` with hashes, so anybody can rebuild the same text. The result is one
JSON-lines file per split; a line is a document: kind ("code" or "prose"), source, path, text.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from rich.progress import track

from adaserve.pair.clean import (
    is_worth_reading,
    markdown_to_text,
    python_to_text,
    rst_to_text,
    tidy,
    unwrap,
)
from adaserve.pair.folders import PairError

HELD_OUT_SHARE = {"code": 0.012, "prose": 0.04}  # of files; prompts are cut from them, too
_PROSE_SUFFIXES = {".rst", ".txt", ".md"}
_SKIPPED_STDLIB = (
    "test/",
    "lib2to3/tests/",
    "idlelib/idle_test/",
    "site-packages/",
    "encodings/",
    "config-",
    "ensurepip/",
)
_SKIPPED_NAMES = re.compile(
    r"(changelog|changes|authors|news|history|licen[cs]e|requirements|/tests?/|/migrations/|/locale/|_pb2|_vendor|vendored)",
    re.I,
)
_OTHER_LICENSES = re.compile(rb"creative ?commons|general public license|mozilla public|\b[AL]?GPL\b", re.I)


@dataclass(frozen=True)
class Source:
    """One pinned source distribution: what is read from it and under which license."""

    name: str
    version: str
    sha256: str
    license: str
    copyright: str
    docs: tuple[str, ...] = ()  # glob patterns below the distribution's top folder
    code: tuple[str, ...] = ()
    max_code_mb: float = 1.0
    max_docs_mb: float = 6.0
    must_contain: str = ""  # only files that say this, where one distribution mixes licenses


@dataclass(frozen=True)
class Document:
    kind: str  # "code" | "prose"
    source: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the name alone, so that a rebuilt corpus has the same split."""
        return _unit_hash(f"{self.source}/{self.path}") < HELD_OUT_SHARE[self.kind]


@dataclass
class Seen:
    """What the corpus already contains, as hashes: whole paragraphs of prose and long lines of code."""

    prose: set[int] = field(default_factory=set)
    code: set[int] = field(default_factory=set)


def load_sources() -> list[Source]:
    table = tomllib.loads(files("adaserve.pair").joinpath("sources.toml").read_text("utf-8"))
    return [Source(**{**row, "docs": tuple(row.get("docs", ())), "code": tuple(row.get("code", ()))})
            for row in table["source"]]  # fmt: skip


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def download(source: Source, folder: Path) -> Path:
    """The sdist of one source, fetched with pip into `folder` and checked against the pinned hash."""
    for found in folder.glob("*"):
        if found.is_file() and hashlib.sha256(found.read_bytes()).hexdigest() == source.sha256:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    pin = folder / "requirement.txt"
    pin.write_text(f"{source.name}=={source.version} --hash=sha256:{source.sha256}\n")
    # Not ":all:", by which pip would also build what it needs to read the source's metadata: Cython, for one.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", source.name,
               "--require-hashes", "-r", str(pin), "-d", str(folder)]  # fmt: skip
    failed = subprocess.run(command, check=False).returncode
    pin.unlink()
    if failed:
        raise PairError(
            f"pip could not fetch {source.name} {source.version}, see above: the same command goes on from "
            "here once it can"
        )
    return download(source, folder)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _to_text(path: str, raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace")
    if path.endswith(".py"):
        return tidy(python_to_text(text))
    return unwrap(tidy(markdown_to_text(text) if path.endswith(".md") else rst_to_text(text)))


def _kind(path: str) -> str:
    return "code" if path.endswith(".py") else "prose"


def _wanted_members(source: Source, archive: Path) -> dict[str, bytes]:
    """Raw files by path below the top folder, in archive order: a gzip stream cannot be sought cheaply."""
    raw: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            globs = source.code if _kind(path) == "code" else source.docs
            suffix_ok = path.endswith(".py") or Path(path).suffix in _PROSE_SUFFIXES
            if not (member.isfile() and suffix_ok and _matches(path, globs)) or _SKIPPED_NAMES.search(
                "/" + path
            ):
                continue
            extracted = tar.extractfile(member)
            assert extracted is not None
            content = extracted.read()
            if source.must_contain.encode() in content and not _OTHER_LICENSES.search(content):
                raw[path] = content
    return raw


def read_sdist(source: Source, archive: Path) -> Iterator[Document]:
    """Documents of one sdist, in an order that depends on names only, up to the source's share."""
    raw = _wanted_members(source, archive)
    left = {"code": source.max_code_mb * 1e6, "prose": source.max_docs_mb * 1e6}
    for path in sorted(raw, key=lambda p: _unit_hash(f"{source.name}/{p}")):
        if left[_kind(path)] > 0:
            text = _to_text(path, raw[path])
            left[_kind(path)] -= len(text)
            yield Document(_kind(path), source.name, path, text)


def read_stdlib() -> Iterator[Document]:
    """The running interpreter's library; the language reference hides in pydoc's topics as one big dict."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_SKIPPED_STDLIB) or "/tests/" in name:
            continue
        if _OTHER_LICENSES.search(path.read_bytes()):
            continue
        if name == "pydoc_data/topics.py":
            yield from _read_topics(path)
            continue
        yield Document("code", "python", name, _to_text(name, path.read_bytes()))


def _read_topics(path: Path) -> Iterator[Document]:
    namespace: dict[str, dict[str, str]] = {}
    exec(compile(path.read_text("utf-8"), "topics", "exec"), namespace)
    for topic, text in sorted(namespace["topics"].items()):
        yield Document("prose", "python", f"topics/{topic}", unwrap(tidy(rst_to_text(text))))


def _fingerprint(text: str) -> int:
    squeezed = " ".join(text.lower().split())
    return int.from_bytes(hashlib.blake2b(squeezed.encode(), digest_size=8).digest(), "big")


def without_repeats(document: Document, seen: Seen) -> Document | None:
    """The document minus what was read before; None if little of it is new.

    Prose loses single paragraphs (boilerplate, copied admonitions); code loses nothing or goes as a whole,
    since a function without its middle teaches nonsense.
    """
    if document.kind == "code":
        lines = {_fingerprint(line) for line in document.text.splitlines() if len(line.strip()) > 30}
        old = len(lines & seen.code)
        if lines and old > 0.4 * len(lines):
            return None
        seen.code |= lines
        return document
    kept: list[str] = []
    for paragraph in document.text.split("\n\n"):
        mark = _fingerprint(paragraph)
        if len(paragraph) < 60 or mark not in seen.prose:
            kept.append(paragraph)
            if len(paragraph) >= 60:
                seen.prose.add(mark)
    text = "\n\n".join(kept)
    if len(text) < 0.5 * len(document.text):
        return None
    return replace(document, text=text)


def collect(cache: Path) -> list[Document]:
    documents = list(track(read_stdlib(), description="Reading the standard library"))
    for source in track(load_sources(), description="Reading sources"):
        documents.extend(read_sdist(source, download(source, cache / source.name)))
    read = track(documents, description="Choosing documents")
    return [d for d in read if is_worth_reading(d.text)]


def build(folder: Path) -> None:
    """Writes train.jsonl and held_out.jsonl below `folder`.

    Held-out documents are de-duplicated first: whatever they share with the rest is then missing from the
    training text, never the other way round.
    """
    documents = collect(folder / "sdists")
    documents.sort(key=lambda d: not d.held_out)
    seen = Seen()
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{split}.partial" for split in ("held_out", "train")]
    with parts[0].open("w") as held_out, parts[1].open("w") as train:
        for document in track(documents, description="Leaving out repeats"):
            fresh = without_repeats(document, seen)
            if fresh is None or len(fresh.text) < 300:
                continue
            out = held_out if fresh.held_out else train
            out.write(json.dumps(asdict(fresh)) + "\n")
    for part in parts:  # the training text last: where it is, all is there
        part.replace(part.with_suffix(".jsonl"))


def read_documents(path: Path) -> list[Document]:
    with path.open() as lines:
        return [Document(**json.loads(line)) for line in lines]

"""Token streams on disk and random batches from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from adaserve.pair.corpus import Document, read_documents
from adaserve.pair.tokenizer import as_hugging_face, load_tokenizer, train_tokenizer
from adaserve.pair.vocabulary import BOS_ID, EOS_ID

Tokens = npt.NDArray[np.uint16]  # of vocabularies of up to MAX_VOCABULARY
_TOKENIZER_SAMPLE_CHARS = 12_000_000


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[Tokens]:
    """Each document as begin, text, end."""
    for start in track(range(0, len(documents), 256), description="Encoding"):
        texts = [d.text for d in documents[start : start + 256]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16)


def write_stream(path: Path, pieces: Iterable[Tokens]) -> int:
    total = 0
    with path.open("wb") as out:
        for piece in pieces:
            out.write(piece.tobytes())
            total += len(piece)
    return total


def prepare(corpus: Path, *, seed: int) -> None:
    """Trains the vocabulary (if absent), writes train.bin, held_out-<kind>.bin and their sizes."""
    rng = np.random.default_rng(seed)
    documents = read_documents(corpus / "train.jsonl")
    documents = [documents[i] for i in rng.permutation(len(documents))]
    if not (corpus / "tokenizer.json").exists():
        as_hugging_face(train_tokenizer(_sample(documents))).save_pretrained(corpus)
    tokenizer = load_tokenizer(corpus)
    counts = {"train": write_stream(corpus / "train.bin", encode_documents(tokenizer, documents))}
    held_out = read_documents(corpus / "held_out.jsonl")
    for kind in ("code", "prose"):
        chosen = [d for d in held_out if d.kind == kind]
        counts[kind] = write_stream(corpus / f"held_out-{kind}.bin", encode_documents(tokenizer, chosen))
    (corpus / "tokens.json").write_text(json.dumps(counts) + "\n")


def _sample(documents: list[Document]) -> Iterator[str]:
    left = _TOKENIZER_SAMPLE_CHARS
    for document in documents:
        if left <= 0:
            return
        left -= len(document.text)
        yield document.text


def open_stream(path: Path) -> Tokens:
    return np.memmap(path, dtype=np.uint16, mode="r")


class Batches:
    """Windows of a stream without replacement: an epoch is a random permutation of disjoint windows.

    The state is (seed, tokens already used), so a resumed run goes on where it stopped.
    """

    def __init__(self, stream: Tokens, *, seed: int) -> None:
        self.stream = stream
        self.seed = seed
        self.used_tokens = 0

    def take(self, rows: int, length: int) -> Tensor:
        """[rows, length + 1] tokens: inputs and, shifted by one, labels."""
        windows = (len(self.stream) - 1) // length
        out = np.empty((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            epoch, position = divmod(self.used_tokens, windows * length)
            order = self._order(epoch, length, windows)
            start = int(order[position // length]) * length
            out[row] = self.stream[start : start + length + 1]
            self.used_tokens += length
        return torch.from_numpy(out)

    def _order(self, epoch: int, length: int, windows: int) -> npt.NDArray[np.int64]:
        key = (epoch, length)
        if getattr(self, "_key", None) != key:
            self._key = key
            self._cached = np.random.default_rng([self.seed, epoch, length]).permutation(windows)
        return self._cached

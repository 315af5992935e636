"""Pairs of a chosen cost without downloads: the embedded target and one of its drafts, both widened."""

from __future__ import annotations

import fcntl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adaserve.pair.folders import HEAD, cache_folder
from adaserve.pair.shape import parse_size
from adaserve.pair.widen import HeadSize, Width, ensure_widened, ensure_widened_head, shipped_draft

SHIPPED_LAYERS = {"target": 4, "draft": 2}


class Draft(Protocol):
    """A draft that ships."""

    def folder(self, target: Path) -> Path:
        """Its folder for a ``target``, made in the cache at first use. Raises PairError."""
        ...


@dataclass(frozen=True, slots=True)
class Shipped:
    """As it is, for a target that is only deeper or has more columns."""

    name: str = "draft"

    def folder(self, target: Path) -> Path:
        return shipped_draft(self.name)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a model that one is widened to; ``hidden`` and ``vocabulary`` 0 = as shipped."""

    size: str  # parameters
    layers: int  # in all: each costs kernel launches and KV
    hidden: int = 0
    vocabulary: int = 0

    def width(self, model: str) -> Width:
        extra = max(0, self.layers - SHIPPED_LAYERS[model])
        return Width(parse_size(self.size), extra, self.hidden, self.vocabulary)

    def folder(self, target: Path) -> Path:
        """As a draft model."""
        return ensure_widened("draft", self.width("draft"))


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Of an EAGLE-3 head that the embedded one is widened to."""

    size: str  # parameters
    vocabulary: int

    def folder(self, target: Path) -> Path:
        return ensure_widened_head(target, HeadSize(parse_size(self.size), self.vocabulary))


LARGE_TARGET = Cost("8B", 32, 4096, 128_256)
LARGE_DRAFT = Cost("1.5B", 16, 2048, 128_256)
LARGE_HEAD = HeadCost("425M", 32_000)
"""What a forward of Llama 3.1 8B, of Llama 3.2 1B and of the EAGLE-3 head published for the former costs, KV
per token included. The draft has more parameters than the 1B model since its embedding, which is only looked
up, is apart from its output layer."""
LARGE_DRAFTS: dict[str, Draft] = {"model": LARGE_DRAFT, "eagle3": LARGE_HEAD}
SHIPPED_DRAFTS: dict[str, Draft] = {"model": Shipped(), "eagle3": Shipped(HEAD)}
LARGE_GIB = 30
"""Of memory: 17.7 of weights, what SGLang keeps for prefills and graphs (7 on such a GPU), ours, and KV."""


def widened_pair(target: Cost, draft: Draft) -> tuple[Path, Path]:
    """Folders of a target and a draft with the outputs of embedded ones and the cost of larger models.

    Waits for another process that makes this pair. Raises PairError.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    # A small pair must not wait for a large one, which it may be there to replace.
    with (cache_folder() / f"widening-{target.size}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wide = ensure_widened("target", target.width("target"))
        return wide, draft.folder(wide)


if __name__ == "__main__":  # makes the large pair, with a draft of the kind, while something else runs
    print(*widened_pair(LARGE_TARGET, LARGE_DRAFTS[(sys.argv[1:] or ["model"])[0]]), sep="\n")

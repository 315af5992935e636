"""Pairs of a chosen cost without downloads: the embedded pair, both models widened."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

from adaserve.pair.folders import cache_folder
from adaserve.pair.shape import parse_size
from adaserve.pair.widen import Width, ensure_widened, shipped_draft

SHIPPED_LAYERS = {"target": 4, "draft": 2}


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


LARGE_TARGET = Cost("8B", 32, 4096, 128_256)
LARGE_DRAFT = Cost("1.5B", 16, 2048, 128_256)
"""What a forward of Llama 3.1 8B and of Llama 3.2 1B costs, KV per token included. The draft has more
parameters than the latter since its embedding, which is only looked up, is apart from its output layer."""
LARGE_GIB = 30
"""Of memory: 17.7 of weights, what SGLang keeps for prefills and graphs (7 on such a GPU), ours, and KV."""


def widened_pair(target: Cost, draft: Cost | None) -> tuple[Path, Path]:
    """Folders of a target and a draft with the outputs of the embedded pair and the cost of larger models.

    ``draft`` None: the shipped draft. Waits for another process that makes this pair. Raises PairError.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    # A small pair must not wait for a large one, which it may be there to replace.
    with (cache_folder() / f"widening-{target.size}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wide = ensure_widened("target", target.width("target"))
        return wide, shipped_draft() if draft is None else ensure_widened("draft", draft.width("draft"))


if __name__ == "__main__":  # makes the large pair while something else runs
    print(*widened_pair(LARGE_TARGET, LARGE_DRAFT), sep="\n")

"""Pairs of a chosen cost without downloads: the embedded pair, both models widened."""

from __future__ import annotations

from pathlib import Path

from adaserve.pair.widen import Width, cache_folder, ensure_embedded_pair, parse_size, weights_folder, widen

SHIPPED_LAYERS = 4
SHIPPED_DRAFT_LAYERS = 2


def widened_pair(size: str, layers: int, draft_size: str | None, draft_layers: int) -> tuple[Path, Path]:
    """Folders of a target and a draft with the outputs of the embedded pair and the cost of larger models.

    ``layers`` in all: a real model of that size has as many, and each costs kernel launches and KV.
    ``draft_size`` None: the shipped draft. Raises PairError.
    """
    target, draft = ensure_embedded_pair(size, extra_layers=max(0, layers - SHIPPED_LAYERS))
    if draft_size is None:
        return target, draft
    width = Width(parse_size(draft_size), max(0, draft_layers - SHIPPED_DRAFT_LAYERS))
    wide = cache_folder() / f"{draft.name}-{width.parameters}-{width.extra_layers}-extra-layers"
    if not (wide / "config.json").exists():
        widen(weights_folder() / "draft", wide, width)
    return target, wide

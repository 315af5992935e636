"""Which sources propose candidates on this server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from adaserve.config import AdaServeConfig
from adaserve.engine.device import Device
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.sources.draft_head import HeadSource
from adaserve.engine.sources.draft_model import DraftModel
from adaserve.engine.sources.forced import ForcedSource, spelling_of
from adaserve.engine.sources.self_draft import SelfDraftSource
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.sources.suffix import SuffixSource
from adaserve.sharpening import load_sharpening
from adaserve.slo.ledger import asked_of


def sources_of(
    config: AdaServeConfig,
    device: Device,
    models: Sequence[DraftModel],
    req_to_token: Tensor,
    tokenizer: Any,
) -> Iterator[TreeSource]:
    """What ``config`` asks for. ``tokenizer``: None where SGLang has none, and so no grammars.

    Draft models come first: where the target has the KV of their nodes, too, nothing has to move.
    """
    for number, model in enumerate(models):
        slots = model.runner.token_to_kv_pool.k_buffer[0].shape[0]
        cache = DraftCache(device.drafts[number], req_to_token, slots, config.deepest + 1)
        kind = HeadSource if model.kind in ("eagle3", "mtp") else BeamSource
        sharpening = load_sharpening(Path(model.folder))
        yield kind(device, cache, sharpening, config.beam_candidates, model, number)
    if config.medusa is not None:
        assert device.medusa is not None
        sharpening = load_sharpening(Path(config.medusa))
        yield StatelessSource(device.medusa, sharpening, config.beam_candidates, device.medusa.most_steps)
    if config.has_self:
        assert device.self_drafter is not None
        yield SelfDraftSource(device.self_drafter, config.beam_candidates)
    if config.forced_depth and tokenizer is not None and (spelling := spelling_of(tokenizer)):
        yield ForcedSource(spelling, config.forced_depth)
    if config.has_suffix:
        yield SuffixSource(
            config.suffix_depth,
            config.suffix_candidates,
            config.suffix_memory_mb * 1_000_000,
            tenant=(lambda req: asked_of(req).tenant) if config.suffix_scope == "key" else None,
        )

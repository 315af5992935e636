"""Of a stream that its client does not read, only the newest output is kept.

Why: SGLang queues an output of some kilobytes for every step of a request. While the client reads nothing,
nobody empties that queue, and a client may open as many such streams as it likes. Each output holds
everything before it, and of several SGLang sends the last one, so the others need not be kept. With
``--incremental-streaming-output`` an output holds only what is new, and all of them are sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._handle_batch_output", _newest_alone, HookType.AROUND)


async def _newest_alone(original: Callable[..., Awaitable[None]], self: Any, outputs: Any) -> None:
    await original(self, outputs)
    if self.incremental_streaming_output:
        return
    for rid in outputs.rids:
        if (state := self.rid_to_state.get(rid)) is not None:
            del state.out_list[:-1]

"""The process groups of a server with one rank on a CPU host are one group, with one thread.

Why: SGLang makes two groups for each kind of parallelism, also where there is one rank. On a CPU all of them
are gloo's, and each has a thread that looks for messages a hundred times per second. Eight that wait for
nobody took 3% of a core from the models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.host.device import on_cpu
from adaserve.patches import hook


def register() -> None:
    if on_cpu():
        hook("torch.distributed.new_group", _shared, HookType.AROUND, always=True)


def _shared(
    original: Callable[..., Any], ranks: Any = None, timeout: Any = None, backend: Any = None, **rest: Any
) -> Any:
    import torch.distributed as dist

    if dist.get_world_size() == 1 and backend == dist.get_backend() == dist.Backend.GLOO:
        return dist.group.WORLD
    return original(ranks, timeout, backend, **rest)

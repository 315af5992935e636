"""Compiled grammars are kept up to a limit, compiling gives way to models on a CPU, long grammars do not hold
up the others, and a grammar that was late is not refused for ever.

Why: SGLang keeps every grammar that a client has ever sent, and xgrammar keeps it once more. Many clients
make a schema for one request, with an enum of what they have at hand. So a server would grow until its host
has no memory, and a client who wants that needs some minutes. Here those that were used last stay.

SGLang also remembers that compiling a grammar took too long, and refuses it from then on. But compilations
wait for one another, so another client's may have been the reason.

xgrammar's time grows with the square of a schema: an enum of 20,000 words takes 17 s, and two of those had
all others wait, until they were refused as late. So long ones have a thread of their own, and wait there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.host.cores import usable_cores
from adaserve.host.device import on_device
from adaserve.patches import hook

MAX_GRAMMARS = 1024
MAX_BYTES = 256 << 20
"""Of all that are kept. One that is used stays in memory as long as it is, kept or not."""

NICE = 10
"""Of a thread that compiles beside models on a CPU: where both want a core, it gets a tenth."""

LONG = 16_384
"""Characters of a grammar that waits for other long ones. Shorter ones took at most a second."""

LATE = "Grammar preprocessing timed out"
"""What SGLang says of a grammar that took too long."""

_SIZES = "_adaserve_sizes"


def register() -> None:
    base = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
    hook(f"{base}.__init__", _own_threads, HookType.AFTER)
    hook(f"{base}.set_cache", _keep, HookType.AROUND)
    hook(f"{base}.get_cached_or_future_value", _use, HookType.BEFORE)
    xgrammar = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend"
    hook(f"{xgrammar}.__init__", _limit_compiler, HookType.AFTER)
    hook(f"{xgrammar}._new_framing_compiler", _framing_compiler, HookType.AROUND)


class Compilers(ThreadPoolExecutor):
    """In place of SGLang's executor, whose ``submit`` gets the grammar's key."""

    def __init__(self, threads: int | None, initializer: Callable[[], None] | None = None) -> None:
        super().__init__(threads, initializer=initializer)
        self._of_long = ThreadPoolExecutor(1, initializer=initializer)

    def submit(self, compile: Callable[..., Any], key: tuple[str, str], /, *more: Any) -> Future[Any]:  # type: ignore[override]
        submit = self._of_long.submit if len(key[1]) > LONG else super().submit
        return submit(compile, key, *more)


def _own_threads(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """For all backends, and for the one that a reasoning parser puts around another: that compiles then."""
    backend.executor = Compilers(usable_cores(), _give_way) if _on_cpu() else Compilers(None)


def _limit_compiler(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """xgrammar keeps what it has compiled as well, by default without a limit."""
    from xgrammar import GrammarCompiler

    backend.grammar_compiler = GrammarCompiler(
        backend._tokenizer_info, max_threads=_threads(), cache_limit_bytes=MAX_BYTES
    )


def _framing_compiler(_: Callable[[Any], Any], tokenizer_info: Any) -> Any:
    """The same for grammars that a reasoning parser puts into its own, of which nothing is kept."""
    from xgrammar import GrammarCompiler

    return GrammarCompiler(tokenizer_info, max_threads=_threads(), cache_enabled=False)


def _threads() -> int:
    """Of one compilation. On two cores, with xgrammar's eight, a token of the others took three times as long
    for seconds. So there it is the executor's thread alone, which gives way."""
    return 1 if _on_cpu() else 8


def _on_cpu() -> bool:
    from sglang.srt.runtime_context import get_device

    return not on_device(get_device().device)


def _give_way() -> None:
    mine = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, mine, max(NICE, os.getpriority(os.PRIO_PROCESS, mine)))


def _use(backend: Any, key: tuple[str, str], *_: Any, **__: Any) -> None:
    """What is used becomes the newest."""
    if (kept := backend.cache.pop(key, None)) is not None:
        backend.cache[key] = kept


def _keep(original: Callable[..., None], backend: Any, key: tuple[str, str], grammar: Any) -> None:
    if getattr(grammar, "error_message", "").startswith(LATE):
        return
    sizes: dict[Any, int] = vars(backend).setdefault(_SIZES, {})
    for gone in sizes.keys() - backend.cache.keys():  # emptied by /flush_cache
        del sizes[gone]
    original(backend, key, grammar)
    sizes[key] = _size(key, grammar)
    while len(sizes) > MAX_GRAMMARS or sum(sizes.values()) > MAX_BYTES:
        oldest = next(iter(backend.cache))
        del backend.cache[oldest], sizes[oldest]


def _size(key: tuple[str, str], grammar: Any) -> int:
    """Bytes, about: of the text and of what was compiled of it, where the backend says how much that is."""
    compiled = getattr(getattr(grammar, "grammar", None) or grammar, "ctx", None)
    return sum(map(len, key)) + int(getattr(compiled, "memory_size_bytes", 0))

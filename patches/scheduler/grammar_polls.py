"""While a grammar is compiled, those that run are not held up.

Why: as long as any request waits for its grammar, SGLang looks in every scheduling step whether it is there,
and sleeps in between, 5 ms in all (``SGLANG_GRAMMAR_POLL_INTERVAL``). All that run wait meanwhile, and a long
schema takes seconds. Here it looks once and goes on, where there is anything else to do.

SGLang gives a grammar up after 10,000 looks. They are counted by their times as they were before, so a
grammar has as long as it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

LOOK_S = 1e-4
"""In place of SGLang's interval: it looks once, and sleeps for a tenth of this."""

_LOOKED_S, _COUNTED_S = "_adaserve_looked_s", "_adaserve_counted_s"


def register() -> None:
    manager = "sglang.srt.constrained.grammar_manager.GrammarManager"
    hook(f"{manager}.get_ready_grammar_requests", _look, HookType.AROUND)


def _look(original: Callable[[Any], list[Any]], self: Any) -> list[Any]:
    usual_s, now_s, known = self.SGLANG_GRAMMAR_POLL_INTERVAL, time.monotonic(), vars(self)
    counts = True
    if self.scheduler.waiting_queue or self.scheduler.collect_inflight_reqs():
        self.SGLANG_GRAMMAR_POLL_INTERVAL = min(usual_s, LOOK_S)
        # After a look that counted, SGLang would have slept and then gone through one more step.
        counts = known.get(_LOOKED_S, now_s) >= known.get(_COUNTED_S, now_s) + usual_s
        if not counts:
            for req in self.grammar_queue:
                req.grammar_wait_ct -= 1
    try:
        return original(self)
    finally:
        self.SGLANG_GRAMMAR_POLL_INTERVAL = usual_s
        known[_LOOKED_S] = time.monotonic()
        if counts or _COUNTED_S not in known:
            known[_COUNTED_S] = known[_LOOKED_S]

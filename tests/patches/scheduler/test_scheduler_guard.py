"""An abort ends the request that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.patches.scheduler import scheduler_guard


class Request(SimpleNamespace):
    """One of SGLang's, which may be held weakly."""


@pytest.mark.parametrize(("workers", "ended"), [(1, ["a"]), (2, ["a", "a_0"])])
def test_an_abort_hides_other_requests_only_while_it_looks(workers: int, ended: list[str]) -> None:
    """Where one HTTP process knows all ids, ``a_0`` may be anybody's."""
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tokenizer_worker_num=workers))
    running = {rid: Request(rid=rid) for rid in ("a", "a_0", "ab", "b")}
    scheduler_guard.known_requests(scheduler).update(running)

    def matching(_: Any, asked: Any) -> None:
        met.extend(rid for rid, req in running.items() if req.rid.startswith(asked.rid))

    met: list[str] = []
    scheduler_guard._abort(matching, scheduler, SimpleNamespace(rid="a", abort_all=False))
    assert met == ended
    assert [req.rid for req in running.values()] == list(running)

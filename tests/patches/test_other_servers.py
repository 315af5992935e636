"""A server that runs another algorithm is left as SGLang made it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _wrap_fn

from adaserve import patches
from adaserve.patches.scheduler.stop_strings import _check, _ended

Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a hooked function. Returns what came of it, and who was called in which order."""
    registered: list[Any] = []
    monkeypatch.setattr(HookRegistry, "register", lambda _, *how: registered.append(how))
    monkeypatch.setattr(patches, "targets", [])

    def called(kind: HookType, **more: bool) -> list[str]:
        calls: list[str] = []

        def original(one: int, *, two: int) -> str:
            calls.append("original")
            return f"made of {one} and {two}"

        def hooked(*args: Any, **kwargs: Any) -> Any:
            calls.append("hook")
            if kind is HookType.AROUND:
                return args[0](*args[1:], **kwargs)
            return None if kind is HookType.BEFORE else "changed"

        patches.hook("sglang.srt.server_args.prepare_server_args", hooked, kind, **more)
        came_of_it = _wrap_fn(original, *registered.pop())(1, two=2)
        return [came_of_it, *calls]

    return called


MADE = "made of 1 and 2"
KINDS = {
    HookType.BEFORE: [MADE, "hook", "original"],
    HookType.AFTER: ["changed", "original", "hook"],
    HookType.AROUND: [MADE, "hook", "original"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("ours")
def test_a_hook_acts_on_our_server(kind: HookType, run: Run) -> None:
    assert run(kind) == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("theirs")
def test_a_hook_leaves_another_server_alone(kind: HookType, run: Run) -> None:
    assert run(kind) == [MADE, "original"]
    assert run(kind, always=True) == KINDS[kind]


@pytest.mark.usefixtures("theirs")
def test_what_every_request_calls_in_every_iteration_asks_itself() -> None:
    params = SimpleNamespace(stop_strs=["a"], stop_regex_strs=[])
    req = SimpleNamespace(sampling_params=params, finished_len=1, reasoning_tokens=3)
    assert _check(lambda _, tokens: tokens == 3, req, 3)
    _ended(None, req, 3)
    assert req.reasoning_tokens == 3

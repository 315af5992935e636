"""Hooks reach every module that holds what they replace, as SGLang's own registry reaches them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from adaserve.patches.start import rebind_imports

SOURCE = """
def called():
    return "called"

def other():
    return "other"

class Thing:
    @classmethod
    def made(cls):
        return "made"

    def asked(self):
        return "asked"
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes one that can be imported, and a registry without other hooks."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(hook_registry, "_propagate_patch", hook_registry._propagate_patch)

    def make(name: str, source: str = "") -> ModuleType:
        made = ModuleType(name)
        exec(source, vars(made))
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def around(original: Callable[..., str], *args: Any) -> str:
    return f"hooked {original(*args)}"


def hook(*targets: str) -> None:
    for target in targets:
        HookRegistry.register(target, around, HookType.AROUND)


def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What SGLang's own function is asked to look for."""
    asked, scan = list[object](), hook_registry._propagate_patch

    def counted(original: object, *others: Any) -> int:
        asked.append(original)
        return scan(original, *others)

    monkeypatch.setattr(hook_registry, "_propagate_patch", counted)
    return asked


@pytest.mark.parametrize("ours", [False, True])
def test_all_who_hold_it_call_the_hook(
    module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    asked = scans(monkeypatch)
    source, user = module("one", SOURCE), module("two")
    user.mine, user.theirs, user.kind = source.called, source.other, source.Thing
    user.one = sys.modules["one"]
    if ours:
        rebind_imports.register()
    hook("one.called", "one.other", "one.Thing.made", "one.Thing.asked")
    HookRegistry.apply_hooks()
    told = [source.called(), user.mine(), user.theirs(), user.kind.made(), user.kind().asked()]
    assert told == [f"hooked {what}" for what in ("called", "called", "other", "made", "asked")]
    assert len(asked) == (0 if ours else 4), "every module is looked at once, and not for every hook"


def test_modules_that_come_late_are_reached(
    module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plugin's target may be imported while hooks are applied, and what is hooked later is found as
    SGLang finds it."""
    source = module("one", SOURCE)
    asked = scans(monkeypatch)
    rebind_imports.register()
    hook("one.called", "one.other")
    apply, late = HookRegistry._apply_target, list[ModuleType]()

    def importing(target: str, hooks: list[Any]) -> None:
        if not late:
            apply(target, hooks)
            late.append(module("two", ""))
            late[0].other = source.other
        else:
            apply(target, hooks)

    monkeypatch.setattr(HookRegistry, "_apply_target", importing)
    HookRegistry.apply_hooks()
    assert late[0].other() == "hooked other"
    more, user = module("three", SOURCE), module("four")
    user.called = more.called
    hook("three.called")
    HookRegistry.apply_hooks()
    assert user.called() == more.called() == "hooked called" and len(asked) == 1


def test_what_was_replaced_meanwhile_stays(module: Callable[..., ModuleType]) -> None:
    source, user = module("one", SOURCE), module("two")
    user.called, user.other = source.called, source.other
    rebind_imports.register()
    hook("one.called", "one.other")
    first, second = sorted(HookRegistry._hooks.items())
    HookRegistry._apply_target(*first)
    user.other = len
    HookRegistry._apply_target(*second)
    assert user.called() == "hooked called" and user.other is len and source.other() == "hooked other"

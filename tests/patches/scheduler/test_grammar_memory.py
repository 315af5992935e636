"""What a server keeps of its clients' grammars has a limit, and nobody is refused for being late."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.plugins.hook_registry import _wrap_fn

from adaserve.patches.scheduler import grammar_memory
from adaserve.patches.scheduler.grammar_memory import (
    LATE,
    LONG,
    NICE,
    Compilers,
    _framing_compiler,
    _keep,
    _limit_compiler,
    _own_threads,
    _use,
)


class Backend:
    """Holds what SGLang's holds."""

    def __init__(self) -> None:
        self.cache: dict[tuple[str, str], Any] = {}

    def keep(self, text: str, size: int = 1) -> None:
        grammar = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=size))
        _keep(BaseGrammarBackend.set_cache, self, ("json", text), grammar)

    @property
    def kept(self) -> list[str]:
        return [text for _, text in self.cache]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr("sglang.srt.runtime_context.get_device", lambda: SimpleNamespace(device="cpu"))
    return Backend()


def test_those_that_were_used_last_stay(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_memory, "MAX_GRAMMARS", 2)
    backend.keep("a")
    backend.keep("b")
    _use(backend, ("json", "a"), False)
    _use(backend, ("json", "unknown"), False)
    backend.keep("c")
    assert backend.kept == ["a", "c"]


def test_large_ones_are_few(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_memory, "MAX_BYTES", 1000)
    for text in "abc":
        backend.keep(text, 400)
    assert backend.kept == ["b", "c"]
    backend.keep("c", 400)  # once more
    assert backend.kept == ["b", "c"]
    backend.keep("d", 2000)
    assert backend.kept == []
    backend.keep("long" * 300)  # its text counts, too
    assert backend.kept == []


def test_an_emptied_cache_is_empty(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_memory, "MAX_BYTES", 1000)
    backend.keep("a", 900)
    backend.cache.clear()
    backend.keep("b", 900)
    assert backend.kept == ["b"]


def test_what_lies_behind_a_reasoning_parser_counts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_memory, "MAX_BYTES", 1000)
    inner = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=2000))
    _keep(BaseGrammarBackend.set_cache, backend, ("json", "a"), SimpleNamespace(grammar=inner))
    assert backend.kept == []


def test_a_grammar_that_came_late_may_come_again(backend: Backend) -> None:
    keep, wrong = BaseGrammarBackend.set_cache, InvalidGrammarObject("root ::= is no rule")
    _keep(keep, backend, ("ebnf", "late"), InvalidGrammarObject(LATE))
    _keep(keep, backend, ("ebnf", "wrong"), wrong)
    assert backend.kept == ["wrong"]


def test_the_compiler_of_the_grammars_has_the_same_limit(backend: Backend) -> None:
    from xgrammar import TokenizerInfo

    made: Any = backend
    made._tokenizer_info = TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    _limit_compiler(None, made, None)
    assert made.grammar_compiler.cache_limit_bytes == grammar_memory.MAX_BYTES


@pytest.mark.parametrize(("device", "threads", "gives_way"), [("cpu", 1, True), ("cuda", 8, False)])
def test_compiling_gives_way_to_models_on_a_cpu(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, device: str, threads: int, gives_way: bool
) -> None:
    """Else one schema takes the cores from everybody's tokens for seconds."""
    compiled_with: list[tuple[int, bool]] = []

    def compiler(_: Any, max_threads: int, cache_enabled: bool = True, **__: Any) -> None:
        compiled_with.append((max_threads, cache_enabled))

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr("xgrammar.GrammarCompiler", compiler)
    monkeypatch.setattr("sglang.srt.runtime_context.get_device", lambda: SimpleNamespace(device=device))
    vars(backend).update(executor=ThreadPoolExecutor(), _tokenizer_info=None)
    _own_threads(None, backend)
    _limit_compiler(None, backend)
    _framing_compiler(lambda _: pytest.fail("with eight threads"), None)
    assert compiled_with == [(threads, True), (threads, False)]
    usual = niceness()
    for text in ("short", "long" * LONG):
        ran = vars(backend)["executor"].submit(lambda *_: niceness(), ("json", text), False)
        assert ran.result() == min(19, max(usual, NICE * gives_way))
    assert niceness() == usual, "only the threads that compile"


def test_a_reasoning_parser_compiles_in_the_same_threads(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands around the backend that compiles, and is what SGLang asks."""
    hooks: dict[str, tuple[Any, Any]] = {}
    monkeypatch.setattr(grammar_memory, "hook", lambda target, *how: hooks.update({target: how}))
    grammar_memory.register()
    how = hooks["sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__"]
    monkeypatch.setattr(BaseGrammarBackend, "__init__", _wrap_fn(BaseGrammarBackend.__init__, *how))
    detector = SimpleNamespace(
        get_think_end_token_ids=lambda _: [1], get_answer_frame=lambda: None, think_excluded_tokens=None
    )
    parser: Any = SimpleNamespace(detector=detector)
    tokenizer: Any = None
    around = ReasonerGrammarBackend(BaseGrammarBackend(), parser, tokenizer)
    assert isinstance(around.executor, Compilers)


def test_long_grammars_hold_up_nobody_else() -> None:
    """However many there are; they were compiled by the same few threads as all others."""
    may_end, others, begun = threading.Event(), threading.Event(), list[int]()

    class Compiling(BaseGrammarBackend):
        def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> Any:
            begun.append(len(key[1]))
            (may_end if len(key[1]) > LONG else others).wait(30)
            return key[1]

    backend = Compiling()
    backend.executor = Compilers(2)
    others.set()
    long = [backend.get_cached_or_future_value(("json", "x" * (LONG + n)), False)[0] for n in (1, 2, 3)]
    short = backend.get_cached_or_future_value(("json", "{}"), False)[0]
    assert short.result(timeout=10) == "{}"
    assert sum(length > LONG for length in begun) <= 1, "the others wait for it"
    assert not any(each.done() for each in long)
    may_end.set()
    assert [len(each.result(timeout=10)) - LONG for each in long] == [1, 2, 3]

"""Which algorithm the server at hand runs, for hooks that ask SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(monkeypatch, "ADASERVE")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(monkeypatch, "EAGLE")


def _runs(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)

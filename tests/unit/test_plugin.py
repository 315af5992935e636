"""What SGLang is told when our plugin could not be loaded: it would serve without it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from adaserve import algorithm, plugin, sglang_compat
from adaserve.algorithm import AdaServeAlgorithm
from adaserve.host.lifetime import PARENT_ENV
from adaserve.sglang_compat import NAME, registration


def test_a_failure_to_register_ends_the_start_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("another version")

    monkeypatch.delenv(PARENT_ENV, raising=False)
    monkeypatch.setattr(registration, "failure", None)
    monkeypatch.setattr(algorithm, "register", fail)
    with pytest.raises(ImportError):
        plugin.register()
    with pytest.raises(RuntimeError, match="could not be registered") as refused:
        AdaServeAlgorithm(NAME, lambda _: object).handle_server_args(SimpleNamespace())
    assert str(refused.value.__cause__) == "another version"


def test_another_sglang_is_refused_before_anything_is_imported_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may lack what our modules import, and would then say that instead."""
    monkeypatch.delenv(PARENT_ENV, raising=False)
    monkeypatch.setattr(registration, "failure", None)
    monkeypatch.setattr(sglang_compat, "version", lambda _: "0.6.0")
    monkeypatch.setitem(sys.modules, "adaserve.algorithm", None)
    monkeypatch.delattr("adaserve.algorithm")
    with pytest.raises(sglang_compat.PatchError, match=r"This is sglang 0\.6\.0\. .*pip install sglang=="):
        plugin.register()

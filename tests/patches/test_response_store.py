"""Responses that clients may ask for again take a limited amount of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaserve.patches import response_store


def served_by(algorithm: str | None) -> SimpleNamespace:
    manager = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=algorithm))
    return SimpleNamespace(tokenizer_manager=manager)


def test_other_servers_keep_them_as_they_do() -> None:
    serving = served_by("EAGLE")
    response_store._bound(None, serving)
    assert not hasattr(serving, "response_store")


def test_the_ones_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MOST_CHARACTERS", 1000)
    serving = served_by("ADASERVE")
    response_store._bound(None, serving)
    responses, messages = serving.response_store, serving.msg_store
    for number in range(6):
        messages[f"resp_{number}"] = ["m" * 200]
        responses[f"resp_{number}"] = "r" * 20
        assert messages["resp_0"], "it is the conversation that goes on"
    assert list(messages) == ["resp_3", "resp_4", "resp_5", "resp_0"]
    assert responses.keys() == messages.keys(), "a response without its conversation cannot be continued"
    assert responses.get("resp_1") is None and responses.get("resp_4") == "r" * 20


def test_storing_again_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MOST_CHARACTERS", 1000)
    kept = response_store.Kept()
    for status in ("queued", "completed") * 50:
        kept["resp_0"] = status
        kept["resp_1"] = "r" * 900
    assert kept == {"resp_0": "completed", "resp_1": "r" * 900}
    kept["resp_2"] = "r" * 5000
    assert list(kept) == ["resp_2"], "the newest is kept in any case"

"""A candidate that cannot be served is dropped, whatever is wrong with it; trainers come and go."""

from __future__ import annotations

import math
import mmap
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from adaserve.config import AdaServeConfig
from adaserve.engine.learning.learner import (
    Learner,
    _Offer,
    bytes_of,
    is_tight,
    known_tokens,
    require_learnable,
    warn_of_slow_training,
)
from adaserve.engine.request_state import RequestState
from adaserve.errors import UnsupportedError
from adaserve.sharpening import Correction, DraftSharpening
from adaserve.slo.events import DraftLearning
from adaserve.trainer.draft import DraftCopy, to_bytes
from adaserve.trainer.messages import Answer, Candidate, Progress


def test_a_draft_whose_training_would_be_in_vain_is_refused(tmp_path: Path) -> None:
    """SGLang's parameters tell: what the trainer makes has other names, or other sizes."""
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    llama = LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=1, tie_word_embeddings=True)
    other = GPTNeoXConfig(**sizes, num_hidden_layers=1)
    for config in (llama, other):
        config.save_pretrained(tmp_path / config.model_type)
    model = LlamaForCausalLM(llama)
    unused: Any = None
    require_learnable(model, str(tmp_path / "llama"), None)
    for folder, served, why in (
        ("gpt_neox", GPTNeoXForCausalLM(other), "there is no gpt_neox.embed_in.weight"),
        ("llama", LlamaForCausalLM(LlamaConfig(**{**sizes, "hidden_size": 8})), "its new values are"),
        ("nowhere", model, "nowhere"),
    ):
        with pytest.raises(UnsupportedError, match=rf"(?s)cannot learn \(.*{why}.*: leave --learn out"):
            weights: Any = SimpleNamespace(model=served)
            Learner(AdaServeConfig(), unused, weights, unused, str(tmp_path / folder), unused, 32, None)


def test_there_is_room_for_a_checkpoint_however_little_of_it_is_served(tmp_path: Path) -> None:
    """A model in half precision, with a map of tokens in place of its output matrix, has less than a third of
    its checkpoint's bytes."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    draft = DraftCopy(str(tmp_path), "cpu", 4096, np.arange(8))
    file = to_bytes(draft.state())
    assert bytes_of(str(tmp_path), None) >= len(file) > 8 * 4096 * 64


def test_a_trainer_is_told_which_tokens_a_draft_is_served_with() -> None:
    def known(model: dict[str, Any], vocabulary: int) -> Any:
        served = SimpleNamespace(config=SimpleNamespace(vocab_size=16), **model)
        ids = known_tokens(served, vocabulary)
        return None if ids is None else ids.tolist()

    assert known({}, 16) is None
    assert known({}, 20) == list(range(16))
    assert known({"hot_token_id": torch.tensor([7, 2, 9])}, 16) == [7, 2, 9]


@pytest.mark.parametrize(
    ("device", "is_cuda", "million", "is_slow"),
    [
        ("cpu", True, 600, True),
        ("cpu", True, 20, False),
        ("cuda:1", True, 600, False),
        ("cpu", False, 600, False),
    ],
)
def test_a_large_draft_wants_a_gpu_to_learn_on(
    device: str, is_cuda: bool, million: int, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    half = SimpleNamespace(numel=lambda: million * 500_000, is_cuda=is_cuda)
    warn_of_slow_training(device, [half, half])
    assert (f"{million} million parameters" in caplog.text) is is_slow
    assert ("--adaserve-learn-device" in caplog.text) is is_slow


@pytest.mark.parametrize(
    ("correction", "result"),
    [
        (Correction(), ValueError("there is no lm_head.weight")),
        (Correction(), KeyError("a name that nobody has thought of")),
        (Correction(tau=0.0), None),  # of a history that somebody has edited
    ],
)
def test_what_is_wrong_with_a_candidate_ends_nothing(
    correction: Correction, result: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: Future[Any] = Future()
    ready.set_result(object()) if result is None else ready.set_exception(result)
    said: list[Any] = []
    learner: Any = Learner.__new__(Learner)
    learner.state, learner.link = DraftLearning(trainer="running"), SimpleNamespace(say=said.append)
    learner._first = SimpleNamespace(sharpening=DraftSharpening((0.0, 1.0), (0.5, 1.0)))
    monkeypatch.setattr(learner, "_exchange", lambda _: pytest.fail("it is served"))
    learner._swap(_Offer(Candidate(7, 0, 1.5, 1.4, correction), ready))
    assert said == [Answer(7, taken=False)]
    assert learner.state.rejected == 1 and learner.state.swaps == 0


def test_what_a_trainer_has_learned_counts_after_its_end() -> None:
    said: list[Any] = []
    link = SimpleNamespace(look=lambda *_: [said.pop()] if said else [], ring=1, is_over=False, cpu_s=0.0)
    learner: Any = Learner.__new__(Learner)
    learner.state, learner._before, learner._held = DraftLearning(trainer="running"), (0, 0, 0), False
    learner.link, learner._looked_s, learner._present, learner._offer = link, 0.0, None, None
    learner._tap = SimpleNamespace(ring=1, recorded=0, dropped=0)
    learner._stats = SimpleNamespace(learned=lambda _: None)
    rounds = [(64, 5), (128, 9), None, None, (64, 4)]  # a trainer ends, and another one is started
    for now_s, counts in enumerate(rounds, start=1):
        if counts is None:
            link.ring = None if link.ring else 2
        else:
            said.append(Progress(1.0, 1.0, 1.0, "undecided", {}, counts[0], 10 * counts[0], counts[1]))
        learner.look([], float(now_s))
    assert (learner.state.requests, learner.state.tokens, learner.state.updates) == (192, 1920, 13)


def test_a_candidate_is_read_beside_the_iterations() -> None:
    """No byte of it is copied between two of them, and none is missed when the trainer has its answer."""
    state = {"w": torch.arange(6.0).reshape(2, 3), "d2t": torch.tensor([1, 2]), "t2d": torch.ones(3).bool()}
    file = to_bytes(state)
    shared = mmap.mmap(-1, len(file) + 100)
    later: list[Any] = []
    learner: Any = Learner.__new__(Learner)
    learner.link = SimpleNamespace(weights=shared, say=lambda _: None)
    learner._helper = SimpleNamespace(submit=lambda *call: later.append(call))
    learner._weights = SimpleNamespace(prepared=lambda tensors: tensors)
    learner.tensors = {n: (str(t.dtype)[6:], tuple(t.shape)) for n, t in state.items()}
    learner.take_in(Candidate(7, len(file), 1.5, 1.4, Correction()))
    shared[: len(file)] = file  # nothing has read it yet
    learner.link.weights = None  # the trainer is gone
    ((read, *words),) = later
    tensors, kept = read(*words)
    shared[: len(file)] = bytes(len(file))  # by the trainer's next candidate
    assert bytes(kept) == file, "for a trainer that starts again"
    assert all(torch.equal(tensors[name], t) and tensors[name].dtype == t.dtype for name, t in state.items())


def compared(ready: Future[Any], exchanged: list[Any]) -> Any:
    """A learner whose candidate is being made ready."""
    learner: Any = Learner.__new__(Learner)
    learner.state, learner._before, learner._held = DraftLearning(trainer="running"), (0, 0, 0), False
    learner.link = SimpleNamespace(look=lambda *_: [], ring=1, is_over=False, cpu_s=0.0, say=lambda _: None)
    learner._looked_s, learner._learned, learner._present = 0.0, None, None
    learner._first = SimpleNamespace(sharpening=DraftSharpening((0.0, 1.0), (0.5, 1.0)))
    learner._serving = lambda: "the present one"
    learner._exchange = exchanged.append
    learner._offer = _Offer(Candidate(7, 0, 1.5, 1.4, Correction()), ready)
    learner._tap = SimpleNamespace(ring=1, recorded=0, dropped=0, pauses=False)
    learner._stats = SimpleNamespace(learned=lambda _: None)
    return learner


def test_a_draft_that_is_held_stays_as_it_is() -> None:
    """A candidate that was on its way waits as well: what is compared would change in the middle."""
    ready: Future[Any] = Future()
    ready.set_result(("weights", "file"))
    exchanged: list[Any] = []
    learner = compared(ready, exchanged)
    learner.serve("held")
    learner.look([], 1.0)
    assert not exchanged and learner.state.swaps == 0
    learner.serve("present")
    learner.look([], 2.0)
    assert len(exchanged) == 1 and learner.state.swaps == 1


def test_no_draft_is_exchanged_while_a_candidate_is_read_into_it() -> None:
    """Its layers would be packed from two drafts."""
    ready: Future[Any] = Future()
    read = []
    learner = compared(ready, [])
    learner._exchange = lambda _: read.append(ready.done())
    later = threading.Timer(0.2, ready.set_result, ((None, None),))
    later.start()
    learner.serve("first")
    later.join()
    assert read == [True]


@pytest.mark.parametrize(
    ("slo_s", "decoded", "since_s", "tight"),
    [
        (0.1, 10, 0.85, False), (0.1, 10, 0.95, True), (0.1, 10, 5.0, True), (math.inf, 10, 1e6, False),
        (0.1, 0, 0.05, False), (0.1, 0, 0.095, True),
    ],
)  # fmt: skip
def test_a_trainer_waits_while_a_request_is_near_its_limit(
    slo_s: float, decoded: int, since_s: float, tight: bool
) -> None:
    """Whoever else has time."""
    states = [RequestState(f"r{i}", "chat", math.inf, 100.0, decoded=5) for i in range(2)]
    states.insert(1, RequestState("r", "chat", slo_s, 100.0, decoded=decoded))
    assert is_tight(states, 100.0 + since_s) == tight

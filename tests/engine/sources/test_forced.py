"""The source of forced text: to whom it offers, with which probabilities, how it learns them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from adaserve.engine.grammar import Grammars
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.forced import FORCED, START, ForcedSource, spelling_of
from adaserve.patches.scheduler import grammar_time
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.pairs import VOCAB, save_tokenizer
from tests.engine.ranks import ALONE
from tests.engine.trees.factories import running

TEXT = "customer target identifier"
UNICODE = "日本"
"""Characters that the tokenizer writes as bytes: at each of them one token is allowed."""
SEVERAL = " target"
"""The tokenizer has this as one token; others begin it."""


class Server:
    """A source, and the grammars and states of its requests."""

    def __init__(self, folder: Path, depth: int = 6) -> None:
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

        save_tokenizer(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.backend = XGrammarGrammarBackend(self.tokenizer, VOCAB, [self.tokenizer.eos_token_id])
        self.spelling = spelling_of(self.tokenizer)
        assert self.spelling is not None
        self.source = ForcedSource(self.spelling, depth)

    def rows(self, *expressions: str | None, max_depth: int = 50) -> DecodeRows:
        """Requests at their first token; None has no grammar."""
        n = len(expressions)
        states = [RequestState(f"r{r}", "default", np.inf, 0.0, generated=[7]) for r in range(n)]
        live = {r: self.backend.dispatch_regex(e) for r, e in enumerate(expressions) if e is not None}
        reqs = [SimpleNamespace(to_finish=None) for _ in expressions]
        grammars = Grammars(reqs, live, VOCAB) if live else None
        return DecodeRows(states, np.full(n, 9), np.arange(n), running(n, [max_depth] * n), grammars=grammars)

    def offer(self, rows: DecodeRows) -> CandidateTrees | None:
        proposal = self.source.offer(rows)
        if proposal is None:
            return None
        assert (proposal.column == proposal.trees.depth).all(), "an accepted chain need not move"
        assert proposal.width == 1 + proposal.trees.depth.max()
        return proposal.trees

    def text(self, trees: CandidateTrees, row: int) -> str:
        start, end = trees.row_start[row : row + 2].tolist()
        assert trees.parent[start:end].tolist() == list(range(-1, end - start - 1))
        assert trees.depth[start:end].tolist() == list(range(1, end - start + 1))
        return b"".join(self.spelling[t] for t in trees.token[start:end].tolist()).decode()

    def emit(self, rows: DecodeRows, *tokens: int) -> None:
        """What the requests emitted after an offer."""
        for state in rows.states:
            state.advance(list(tokens))
        nothing: Any = None  # neither what was verified nor what was accepted matters
        self.source.advanced(rows, nothing, nothing)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_requests_are_offered_what_their_own_grammars_force(server: Server) -> None:
    trees = server.offer(server.rows(UNICODE, None, "[a-z]+", "dog", "cat|dog"))
    assert trees is not None and trees.source is not None and (trees.source == FORCED).all()
    assert [server.text(trees, r) for r in range(5)] == [UNICODE, "", "", "dog", ""]


def test_without_a_grammar_nothing_is_offered(server: Server) -> None:
    assert server.offer(server.rows(None, None)) is None
    assert server.offer(server.rows("[a-z]+")) is None


def test_no_more_is_offered_than_is_allowed(server: Server) -> None:
    """By the server, and by the request, which may be near its end or want no speculation."""
    rows = server.rows(TEXT, TEXT, TEXT)
    limits = replace(rows.running, max_depth=np.array([50, 2, 0]))
    trees = server.offer(replace(rows, running=limits))
    assert trees is not None and np.diff(trees.row_start).tolist() == [6, 2, 0]
    assert TEXT.startswith(server.text(trees, 0)) and server.text(trees, 0).startswith(server.text(trees, 1))


def test_a_token_is_certain_where_it_is_the_only_one(server: Server) -> None:
    trees = server.offer(server.rows(UNICODE, SEVERAL, max_depth=2))
    assert trees is not None
    certain, unsure = np.exp(trees.logprob[:2]), np.exp(trees.logprob[2:])
    assert certain.tolist() == [1.0, 1.0]
    assert unsure[0] == pytest.approx(START)


def test_how_forced_text_is_written_is_learned(server: Server) -> None:
    """A model may write it with shorter tokens; where it has no choice it teaches nothing."""
    rows, rates = server.rows(SEVERAL), server.source.rates
    trees = server.offer(rows)
    assert trees is not None
    first = int(trees.token[0])
    for tokens, more in (((ord("a"), 1), False), ((first, 1), True)):
        before = rates.rate[0]
        server.offer(rows)
        server.emit(rows, *tokens)
        assert (rates.rate[0] > before) == more
    learned = list(rates.rate)
    server.emit(rows, ord("a"))  # nothing was offered
    rows = server.rows(UNICODE)
    server.offer(rows)
    server.emit(rows, 1)
    assert rates.rate == learned


def test_behind_a_token_that_was_written_otherwise_nothing_is_learned(server: Server) -> None:
    rows, rates = server.rows(SEVERAL * 2), server.source.rates
    trees = server.offer(rows)
    assert trees is not None and trees.n_nodes > 1
    tests = rates.tests[0]
    server.emit(rows, ord("a"), *trees.token[1:].tolist())
    assert rates.tests[0] == tests + 1


def test_what_is_never_right_is_not_offered(server: Server) -> None:
    rows = server.rows(SEVERAL)
    for _ in range(400):
        server.source.rates.learn(0, False)
    assert server.offer(rows) is None


def test_a_grammar_that_takes_long_ends_its_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait while it is asked what it forces."""
    rows, clock = server.rows("dog", "cat"), SimpleNamespace(now_s=0.0)
    assert rows.grammars is not None
    reqs, slow = rows.grammars.reqs, rows.grammars.live[1]

    def asked(grammar: Any, *_: Any) -> list[Any]:
        clock.now_s += 10.0 if grammar is slow else 0.001
        return []

    monkeypatch.setattr("adaserve.engine.sources.forced.forced", asked)
    monkeypatch.setattr(grammar_time, "time", SimpleNamespace(thread_time=lambda: clock.now_s))
    assert server.offer(rows) is None
    grammar_time.end_slow(reqs, ALONE.decide)
    assert [req.to_finish is not None for req in reqs] == [False, True]


def test_a_tokenizer_that_xgrammar_cannot_read_keeps_no_server_from_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang serves it without grammars, whatever the error was."""

    def fails(_: Any) -> None:
        raise RuntimeError("no decoder")

    monkeypatch.setattr("adaserve.engine.sources.forced.TokenizerInfo.from_huggingface", fails)
    for tokenizer in (SimpleNamespace(), SimpleNamespace(init_xgrammar=lambda: (None, None))):
        assert spelling_of(tokenizer) is None
    assert "no decoder" in caplog.text

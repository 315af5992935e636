"""Masks of every node against a matcher that reads the node's path from the beginning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from adaserve.engine import transfer
from adaserve.engine.grammar import Grammars, _apply
from adaserve.engine.matchers import GrowingTree, active_grammar, can_roll_back, fill_masks, forced, is_live
from adaserve.engine.request_state import RequestState, deepest_allowed
from adaserve.engine.sources.forced import spelling_of
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.pairs import VOCAB, save_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
KINDS = {
    "json": json.dumps(SCHEMA),
    "regex": r"(yes|no|maybe), [0-9]{2,4}\.",
    "ebnf": 'root ::= "a" | "b" root',
}
INFO = SimpleNamespace(vocab_size=VOCAB)
THINK_END = (7, 9)
"""Token ids that end the reasoning of the tests."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True)
class Backend:
    """Makes fresh matchers of every kind, as SGLang does. ``before``: tokens that no grammar reads."""

    make: Callable[[str], Any]
    before: tuple[int, ...] = ()


@pytest.fixture(scope="module", params=["xgrammar", "llguidance", "reasoner"])
def backend(request: pytest.FixtureRequest, tokenizer: Any) -> Backend:
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    if request.param == "llguidance":
        guidance = GuidanceBackend(tokenizer, n_vocab=VOCAB)
        specs = {**KINDS, "ebnf": 'start: "a" | "b" start'}
        return Backend(lambda kind: getattr(guidance, f"dispatch_{kind}")(specs[kind]))
    xgrammar = XGrammarGrammarBackend(tokenizer, VOCAB, [tokenizer.eos_token_id])

    def plain(kind: str) -> Any:
        return getattr(xgrammar, f"dispatch_{kind}")(KINDS[kind])

    def reasoning(kind: str) -> Any:
        grammar = ReasonerGrammarObject(plain(kind), THINK_END)
        grammar.maybe_init_reasoning(True)
        return grammar

    return Backend(plain) if request.param == "xgrammar" else Backend(reasoning, THINK_END)


def allowed_by(grammar: Any) -> np.ndarray:
    """bool [vocab]: what a matcher allows next, by its own mask on logits."""
    masks, logits = grammar.allocate_vocab_mask(VOCAB, 1, "cpu"), torch.zeros(1, VOCAB)
    grammar.fill_vocab_mask(masks, 0)
    grammar.apply_vocab_mask(logits=logits, vocab_mask=masks)
    return (logits[0] == 0).numpy()


def replayed(backend: Backend, kind: str, text: list[int]) -> Any | None:
    """A matcher that has read ``text``; None where the grammar forbids or ends with a part of it."""
    grammar = backend.make(kind)
    for token in text:
        if not allowed_by(grammar)[token]:
            return None
        grammar.accept_token(token)
        if grammar.is_terminated():
            return None
    return grammar


def walked(backend: Backend, kind: str, rng: np.random.Generator, steps: int) -> list[int]:
    """A random text that the grammar allows and that does not end it."""
    text = list(backend.before) if steps else []
    for _ in range(steps):
        grammar = replayed(backend, kind, text)
        assert grammar is not None
        choices = [t for t in np.flatnonzero(allowed_by(grammar)) if replayed(backend, kind, [*text, int(t)])]
        if not choices:
            break
        text.append(int(rng.choice(choices)))
    return text


def random_tree(
    backend: Backend, kind: str, text: list[int], rng: np.random.Generator, size: int
) -> list[Any]:
    """(parent, token) of nodes by depth: two thirds of the tokens are allowed where they stand."""
    nodes: list[tuple[int, int]] = []
    paths: list[list[int]] = [[]]
    for _ in range(size):
        above = int(rng.integers(len(paths)))
        grammar = replayed(backend, kind, [*text, *paths[above]])
        token = int(rng.integers(VOCAB))
        if grammar is not None and rng.random() < 0.67:
            token = int(rng.choice(np.flatnonzero(allowed_by(grammar))))
        if (above - 1, token) not in nodes:
            nodes.append((above - 1, token))
            paths.append([*paths[above], token])
    order = sorted(range(len(nodes)), key=lambda i: len(paths[i + 1]))
    place = {-1: -1} | {old: new for new, old in enumerate(order)}
    return [(place[nodes[i][0]], nodes[i][1], paths[i + 1]) for i in order]


def request(grammar: Any | None) -> Any:
    params = SimpleNamespace(max_new_tokens=100)
    return SimpleNamespace(
        grammar=grammar, sampling_params=params, custom_logit_processor=None, to_finish=None
    )


def trees_of(rows: list[list[Any]]) -> CandidateTrees:
    flat = [node for row in rows for node in row]
    depth = np.array([len(path) for _, _, path in flat], np.int64)
    return CandidateTrees(
        row_start=np.cumsum([0, *(len(row) for row in rows)]),
        token=np.array([token for _, token, _ in flat], np.int64),
        parent=np.array([parent for parent, _, _ in flat], np.int64),
        depth=depth,
        logprob=-0.5 * depth,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_every_nodes_own_path(backend: Backend, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [walked(backend, kind, rng, steps) for steps in (0, 2, 5)]
    trees = [random_tree(backend, kind, text, rng, 14) for text in texts]
    matchers = [replayed(backend, kind, text) for text in texts]
    free = random_tree(backend, kind, texts[0], rng, 6)
    reqs = [request(m) for m in (matchers[0], None, *matchers[1:])]
    rows, texts = [trees[0], free, *trees[1:]], [texts[0], [], *texts[1:]]
    grammars = Grammars.of(reqs, INFO)
    assert grammars is not None
    candidates = trees_of(rows)
    for _ in range(2):  # the matchers have come back to where they were
        constrained, allowed = grammars.constrain(candidates)
    row = np.concatenate([np.full(1 + len(nodes), r) for r, nodes in enumerate(rows)])
    starts = candidates.row_start
    candidate = np.concatenate(
        [np.concatenate([[-1], np.arange(starts[r], starts[r + 1])]) for r in range(len(rows))]
    )
    chosen = rng.permutation(len(row))[: len(row) * 2 // 3]  # a verification keeps some of them
    logits = torch.zeros(len(chosen), VOCAB)
    allowed.mask(logits, row[chosen], candidate[chosen])
    possible, forbidden = constrained.logprob == candidates.logprob, 0
    assert possible[starts[1] : starts[2]].all() and len(free), "a request without a grammar was touched"
    for got, r, node in zip(logits, row[chosen].tolist(), candidate[chosen].tolist(), strict=True):
        if reqs[r].grammar is None:
            assert (got == 0).all()
            continue
        path = [] if node < 0 else rows[r][node - starts[r]][2]
        exact = replayed(backend, kind, [*texts[r], *path])
        if node >= 0:
            assert possible[node] == (exact is not None)
            assert possible[node] or constrained.logprob[node] == -np.inf
        if exact is None:
            forbidden += 1
        else:
            assert ((got == 0).numpy() == allowed_by(exact)).all()
    assert forbidden, "nothing was forbidden"


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_chooses_among_what_is_allowed(backend: Backend, kind: str) -> None:
    rng = np.random.default_rng(7)
    text = walked(backend, kind, rng, 3)
    matcher = replayed(backend, kind, text)
    grammars = Grammars.of([request(None), request(matcher), request(None)], INFO)
    assert grammars is not None
    assert grammars.forbid(np.array([0, 2])) is None
    forbid = grammars.forbid(np.array([0, 1]))
    assert forbid is not None and matcher is not None
    logits = torch.zeros(2, VOCAB)
    none = np.zeros((2, 0), np.int64)
    forbid(logits, none, none, 1)
    assert (logits[0] == 0).all() and ((logits[1] == 0).numpy() == allowed_by(matcher)).all()
    tokens = np.flatnonzero(allowed_by(matcher))[[0, -1]]
    if len(set(tokens.tolist())) == 2:
        logits = torch.zeros(4, VOCAB)
        forbid(logits, np.tile(tokens, (2, 1)), np.full((2, 2), -1), 2)
        assert (logits[:2] == 0).all()
        for got, token in zip(logits[2:], tokens.tolist(), strict=True):
            exact = replayed(backend, kind, [*text, token])
            if exact is not None:
                assert ((got == 0).numpy() == allowed_by(exact)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_search_fills_the_mask_of_each_node_once(
    backend: Backend, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    text = walked(backend, kind, rng, 2 * seed)
    matcher = active_grammar(replayed(backend, kind, text))
    tree, before, filled = GrowingTree(matcher), allowed_by(matcher), 0
    fill = matcher.fill_vocab_mask

    def counted(*args: Any) -> None:
        nonlocal filled
        filled += 1
        fill(*args)

    nodes = random_tree(backend, kind, text, rng, 14)
    tokens, parents = (np.array([node[k] for node in nodes], np.int64) for k in (1, 0))
    masks = matcher.allocate_vocab_mask(VOCAB, 1 + len(nodes), "cpu")
    possible = np.append(True, fill_masks(matcher, tokens, parents, masks))
    depths = np.array([0, *(len(path) for *_, path in nodes)])
    monkeypatch.setattr(matcher, "fill_vocab_mask", counted)
    for depth in range(depths[-1] + 1):
        level = matcher.allocate_vocab_mask(VOCAB, np.count_nonzero(depths == depth), "cpu")
        end = np.count_nonzero(depths <= depth) - 1
        tree.add(tokens[:end], parents[:end], level)
        known = possible[depths == depth]
        assert torch.equal(level[known], masks[depths == depth][known])
        assert np.isin(level[~known].numpy(), (0, -1)).all(), "forbidden, or the end: nothing follows"
    monkeypatch.undo()
    assert filled == np.count_nonzero(possible)
    assert (allowed_by(matcher) == before).all(), "the matcher has not come back"


def test_behind_its_reasoning_a_grammar_is_walked_in_one_call(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step back of SGLang's copies all that the grammar has read."""
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

    xgrammar = XGrammarGrammarBackend(tokenizer, VOCAB, [tokenizer.eos_token_id])
    grammar = ReasonerGrammarObject(xgrammar.dispatch_regex("ab|cd"), THINK_END)
    grammar.maybe_init_reasoning(True)
    for token in THINK_END:
        grammar.accept_token(token)
    monkeypatch.setattr(XGrammarGrammar, "rollback", None)
    tokens = np.array([tokenizer.encode(letter)[0] for letter in "abd"])
    masks = grammar.allocate_vocab_mask(VOCAB, 4, "cpu")
    possible = fill_masks(grammar, tokens, np.array([-1, 0, 0]), masks)
    assert possible.tolist() == [True, True, False]


def forced_by(backend: Backend, kind: str, text: list[int], spelling: list[bytes]) -> list[tuple[int, bool]]:
    """What ``forced`` should find, with matchers that read everything from the beginning."""
    chain: list[tuple[int, bool]] = []
    while len(chain) < 100:
        path = [*text, *(token for token, _ in chain)]
        exact = replayed(backend, kind, path)
        assert exact is not None
        tokens = np.flatnonzero(allowed_by(exact)).tolist()
        longest = max(tokens, key=lambda t: len(spelling[t]))
        if any(not spelling[longest].startswith(spelling[t]) for t in tokens):
            break
        if replayed(backend, kind, [*path, longest]) is None:
            break
        chain.append((longest, len(tokens) == 1))
    return chain


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forced_is_what_masks_allow(backend: Backend, tokenizer: Any, kind: str) -> None:
    spelling = spelling_of(tokenizer)
    assert spelling is not None and spelling[tokenizer.encode("é")[0]] == b"\xc3"
    found = []
    for seed in range(5):
        text = walked(backend, kind, np.random.default_rng(seed), 2 * seed)
        grammar, expected = replayed(backend, kind, text), forced_by(backend, kind, text, spelling)
        assert grammar is not None
        mask, before = grammar.allocate_vocab_mask(VOCAB, 1, "cpu"), allowed_by(grammar)
        for depth in (0, 1, 3, 100):
            got = forced(grammar, spelling, depth, mask)
            assert [(t.token, t.alone) for t in got] == expected[:depth]
            assert (allowed_by(grammar) == before).all(), "the matcher has not come back"
        found += expected
    assert found or kind == "ebnf"


def test_forced_text_may_be_endless_and_of_any_bytes(tokenizer: Any) -> None:
    """xgrammar's own search never comes back from the first, and raises an error in the others."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    xgrammar = XGrammarGrammarBackend(tokenizer, VOCAB, [tokenizer.eos_token_id])
    spelling = spelling_of(tokenizer)
    assert spelling is not None

    def text(grammar: Any) -> bytes:
        mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
        return b"".join(spelling[t.token] for t in forced(grammar, spelling, 20, mask))

    assert set(text(xgrammar.dispatch_ebnf('root ::= "a" root'))) == {ord("a")}
    assert text(xgrammar.dispatch_regex("日本|日木")) == "日本".encode()[:5]
    inside = xgrammar.dispatch_regex("été")
    inside.accept_token(tokenizer.encode("é")[0])
    assert text(inside) == "été".encode()[1:]


def test_a_grammar_that_has_ended_masks_nothing_and_drafts_nothing(backend: Backend, tokenizer: Any) -> None:
    grammar = backend.make("ebnf")
    for token in [*backend.before, *tokenizer.encode("ba")]:
        grammar.accept_token(token)
    state = RequestState("r", "chat", 1.0, 0.0, generated=[1, 2])
    assert is_live(grammar) and deepest_allowed(request(grammar), state) > 0
    grammar.accept_token(tokenizer.eos_token_id)
    assert grammar.is_terminated() and not is_live(grammar)
    assert Grammars.of([request(grammar), request(None)], INFO) is None
    assert deepest_allowed(request(grammar), state) == 0


def test_masks_go_to_the_device_as_everything_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one copy from pinned memory: any other would wait for the verification, whose logits it masks."""
    uploads, masked = [], []
    pack = transfer._pack

    def packed(arrays: Any, *more: Any) -> Any:
        uploads.append(sorted(arrays))
        return pack(arrays, *more)

    class OnDevice:
        def move_vocab_mask(self, mask: torch.Tensor, device: torch.device) -> torch.Tensor:
            assert mask.device == device, "it is there already"
            return mask

        def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            masked.append((tuple(logits.shape), vocab_mask.dtype, tuple(vocab_mask.shape)))

    monkeypatch.setattr(transfer, "_pack", packed)
    monkeypatch.setattr(torch, "from_numpy", None)
    logits, at = torch.zeros(4, 64, device="meta"), np.array([1, 3])
    _apply(OnDevice(), torch.zeros(2, 2, dtype=torch.int32), logits, at)
    assert uploads == [["at", "masks"]] and masked == [((2, 64), torch.int32, (2, 2))]


def test_a_matcher_that_cannot_step_back_drafts_nothing() -> None:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

    class Forward(BaseGrammarObject):
        pass

    state = RequestState("r", "chat", 1.0, 0.0, generated=[1])
    assert not can_roll_back(Forward())
    assert deepest_allowed(request(Forward()), state) == 0

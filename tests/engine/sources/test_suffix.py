"""The suffix source: whose text it proposes, how it learns what a match is worth, what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE

from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.match_rates import KINDS, OTHER, PER_KIND, START, MatchRates
from adaserve.engine.sources.rates import LEAST
from adaserve.engine.sources.suffix import MAX_INDEXED, SUFFIX, SuffixSource
from adaserve.engine.sources.text_index import BYTES_PER_TOKEN
from adaserve.engine.trees.proposal import Proposal
from adaserve.noise import gumbel, quantile
from tests.engine.trees.factories import paths, running

ENOUGH = 1_000_000
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


class Server:
    """What a worker tells its source, for a few requests at once."""

    def __init__(self, memory: int = ENOUGH, tenants: bool = False, depth: int = 6) -> None:
        tenant = (lambda req: req.tenant) if tenants else None
        self.source = SuffixSource(depth, 9, memory, tenant)
        self.states: dict[int, RequestState] = {}
        self.prompts: dict[int, list[int]] = {}

    def start(
        self,
        row: int,
        prompt: list[int],
        first: int,
        tenant: str = "a",
        rid: str = "",
        generated: Sequence[int] = (),
        media: Any = None,
    ) -> None:
        """``generated``: before the request was retracted. ``media``: whether it has images."""
        rid = rid or f"{tenant}-{row}-{len(self.prompts)}"
        req = SimpleNamespace(rid=rid, origin_input_ids=prompt, tenant=tenant, multimodal_inputs=media)
        whole = len(prompt) + len(generated)
        ends = dict.fromkeys((0, whole) if generated else (0, min(5, whole), whole))  # in two chunks
        for start, end in pairwise(ends):
            where = {"prefix_lens": [start], "extend_lens": [end - start]}
            rows = torch.tensor([row])
            self.source.prefilled(SimpleNamespace(reqs=[req], req_pool_indices_cpu=rows, **where), True)
        state = RequestState(rid, "default", np.inf, 0.0, key=17 + row)
        state.generated = [first]
        self.states[row], self.prompts[row] = state, prompt

    def rows(self, *rows: int, temperature: float | list[float] = 0.0, max_depth: int = 6) -> DecodeRows:
        states, n = [self.states[r] for r in rows], len(rows)
        lens = np.array([len(self.prompts[r]) + len(self.states[r].generated) - 1 for r in rows])
        view = replace(running(n, [max_depth] * n), temperature=np.full(n, temperature))
        return DecodeRows(states, lens, np.array(rows), view)

    def offer(self, *rows: int, **more: Any) -> Proposal | None:
        return self.source.offer(self.rows(*rows, **more))

    def emit(self, row: int, *tokens: int) -> None:
        rows = self.rows(row)
        self.states[row].advance(list(tokens))
        nothing: Any = None  # neither what was verified nor what was accepted matters
        self.source.advanced(rows, nothing, nothing)


def chain(proposal: Proposal | None) -> list[int]:
    """The tokens of the first continuation."""
    assert proposal is not None
    tokens, at = [], -1
    for i, parent in enumerate(proposal.trees.parent.tolist()):
        if parent == at:
            tokens.append(int(proposal.trees.token[i]))
            at = i
    return tokens


def test_what_followed_in_the_prompt_is_proposed() -> None:
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3)
    proposal = server.offer(0)
    assert proposal is not None and chain(proposal) == [4, 5, 6, 7, 8, 1]
    trees = proposal.trees
    assert (trees.source == SUFFIX).all() and trees.depth.tolist() == [1, 2, 3, 4, 5, 6]
    assert proposal.column.tolist() == [1, 2, 3, 4, 5, 6], "an accepted continuation need not move"
    assert (np.diff(trees.logprob) < 0).all() and trees.logprob[0] < 0


def test_hashes_of_images_are_not_proposed() -> None:
    """No embedding has them."""
    server, image = Server(), MM_PAD_SHIFT_VALUE + 2**40
    server.start(0, [1, 2, 3, image, image, 9, 1, 2], 3, media=object())
    assert chain(server.offer(0)) == [0, 0, 9, 1, 2, 3]


@pytest.mark.parametrize("tenants", [False, True])
def test_a_long_cached_prompt_is_indexed_bit_by_bit(tenants: bool) -> None:
    """In one go, 100,000 tokens would hold up all requests for a fifth of a second."""
    server = Server(ENOUGH * BYTES_PER_TOKEN, tenants)
    prompt = [*range(10, 10 + 3 * MAX_INDEXED), *PROMPT, 1, 2]
    server.start(0, prompt, 3)
    server.start(1, [*PROMPT, 1, 2], 3)
    assert chain(server.offer(1)) == [4, 5, 6, 7, 8, 1], "others don't wait"
    before = server.source.tokens
    assert before <= MAX_INDEXED + 20, "which came in two chunks, beside a short prompt"
    for token in (4, 5):
        assert server.offer(0) is None, "what is missing of the text would be taken for generated"
        assert server.source.tokens - before == MAX_INDEXED
        before = server.source.tokens
        server.emit(0, token)
    assert chain(server.offer(0)) == [6, 7, 8, 1, 2, 3]
    server.source.finished(0, unheard=False)
    server.source.finished(1, unheard=False)
    assert bool(server.source.tokens) == tenants


def test_a_request_that_ends_before_its_prompt_is_indexed_leaves_nothing_behind() -> None:
    server = Server()
    server.start(0, [*range(3 * MAX_INDEXED)], 3)
    server.source.finished(0, unheard=False)
    assert not server.source.tokens and server.offer(0) is None


def test_what_followed_in_the_output_is_proposed() -> None:
    server = Server()
    server.start(0, [50, 51], 60)
    assert server.offer(0) is None
    server.emit(0, 61, 62, 63, 64)
    assert server.offer(0) is None
    server.emit(0, 60, 61, 62)
    assert chain(server.offer(0)) == [63, 64, 60, 61, 62, 63]


@pytest.mark.parametrize("temperature", [0.0, [0.8, 0.0]])
def test_a_row_without_a_match_has_no_candidates(temperature: float | list[float]) -> None:
    server = Server()
    server.start(0, [50, 51], 60)
    server.start(1, [*PROMPT, 1, 2], 3)
    proposal = server.offer(0, 1, temperature=temperature)
    assert proposal is not None and proposal.trees.row_start.tolist() == [0, 0, 6]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_deeper_than_a_request_may_go(most: int) -> None:
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3)
    proposal = server.offer(0, max_depth=most)
    assert (0 if proposal is None else int(proposal.trees.depth.max())) == most


def test_requests_see_their_own_text_alone_unless_asked_for() -> None:
    server = Server()
    server.start(0, PROMPT, 9)
    server.start(1, [1, 2, 3], 4)
    server.source.finished(0, False)
    assert server.offer(1) is None


def test_one_tenant_is_never_proposed_what_another_was_served() -> None:
    server = Server(tenants=True)
    server.start(0, PROMPT, 9, tenant="a")
    server.emit(0, 10, 11)
    server.start(1, [1, 2, 3], 4, tenant="b")
    assert server.offer(1) is None, "another tenant's running request"
    server.start(2, [1, 2, 3], 4, tenant="a")
    assert chain(server.offer(2)) == [5, 6, 7, 8, 9, 10]
    server.source.finished(0, False)
    server.emit(1, 5), server.emit(2, 5)
    assert server.offer(1) is None, "another tenant's finished request"
    assert chain(server.offer(2)) == [6, 7, 8, 9, 10, 11]


def test_both_of_two_continuations_are_in_one_tree() -> None:
    server = Server(tenants=True)
    server.start(0, [20, 21, 22, 1, 2, 3, 4, 5], 6)
    server.emit(0, 7, 8, 9, 10)
    server.start(1, [30, 31, 32, 1, 2, 3, 4, 70, 71], 72)
    server.emit(1, 73)
    server.start(2, [20, 21, 22, 1, 2, 3], 4)  # six tokens of the first, and the second's are newer
    proposal = server.offer(2)
    assert proposal is not None
    firsts = proposal.trees.token[proposal.trees.depth == 1].tolist()
    assert firsts == [5, 70] and {(5, 6), (70, 71)} <= set(paths(proposal.trees, 0))
    assert (np.diff(proposal.trees.depth) >= 0).all() and proposal.trees.n_nodes == 9, (
        "as many as there may be"
    )
    columns = proposal.column.tolist()
    assert len(set(columns)) == len(columns) and max(columns) < proposal.width


def test_a_retracted_request_goes_on_where_it_was() -> None:
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3, rid="x")
    server.emit(0, 4, 5)
    state = server.states[0]
    server.start(1, server.prompts[0], 3, rid="x")  # in another row
    server.states[1].generated = [*state.generated, 6]
    assert chain(server.offer(1))[:3] == [7, 8, 1]
    server.source.finished(1, False)
    assert server.source.tokens == 0


def test_what_a_retraction_took_back_is_forgotten() -> None:
    """Under overlap a request is retracted before SGLang has taken in its last iteration. It may get the same
    row again, and then say something else."""
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3, rid="x")
    server.emit(0, 40, 41)
    kept = server.states[0].generated[:1]
    server.start(0, server.prompts[0], 3, rid="x", generated=kept)
    server.states[0].generated = [*kept, 4]
    assert chain(server.offer(0))[:3] == [5, 6, 7]


def test_what_is_told_late_of_a_request_that_has_ended_is_not_of_the_next_one() -> None:
    """Its row may have another request by then."""
    server, nothing = Server(), None
    server.start(0, [*PROMPT, 1, 2], 3)
    late = server.rows(0)
    server.states[0].advance([40, 41])
    server.source.finished(0, False)
    for tokens in (0, len(PROMPT) + 2):
        assert server.source.offer(late) is None
        server.source.advanced(late, nothing, nothing)  # type: ignore[arg-type]
        assert server.source.tokens == tokens
        server.start(0, [*PROMPT, 1, 2], 3)


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    server = Server(memory=100 * BYTES_PER_TOKEN, tenants=True)
    for row in range(6):
        server.start(row, [row * 40 + t for t in range(29)], 1000 + row)
        server.emit(row, 2000)
        server.source.finished(row, False)
        assert server.source.tokens <= 100
    server.start(6, list(range(10)), 10)
    assert server.offer(6) is None, "the first text has made room"
    server.start(7, [200 + t for t in range(10)], 210)
    assert chain(server.offer(7)) == [211, 212, 213, 214, 215, 216]


def test_a_text_in_which_nothing_can_be_found_is_not_kept() -> None:
    """It takes more memory than its tokens are counted for."""
    server = Server(tenants=True)
    for prompt, kept in (([1], 0), ([1, 2], 0), ([1, 2, 3], 4)):
        server.start(0, prompt, 9)
        server.offer(0)
        server.source.finished(0, False)
        assert server.source.tokens == kept


def test_a_prompt_that_does_not_fit_takes_nobodys_room() -> None:
    """Neither at once nor chunk by chunk."""
    server = Server(memory=15 * BYTES_PER_TOKEN, tenants=True)
    server.start(0, PROMPT, 1), server.emit(0, 2, 3)
    server.source.finished(0, False)
    server.start(1, list(range(100, 200)), 100, tenant="b")
    assert server.offer(1) is None
    server.start(2, [1, 2, 3], 4)
    assert chain(server.offer(2))[:4] == [5, 6, 7, 8]
    server.emit(2, *range(300, 400))
    server.start(3, [1, 2, 3], 4)
    assert chain(server.offer(3))[:4] == [5, 6, 7, 8], "nor when it is an answer that grows too long"


@pytest.mark.parametrize("tenants", [False, True])
def test_a_request_too_many_goes_without(tenants: bool) -> None:
    server = Server(memory=20 * BYTES_PER_TOKEN, tenants=tenants)
    server.start(0, PROMPT, 1)
    server.start(1, list(range(20, 36)), 20)
    assert server.source.tokens <= 20
    server.emit(0, 2, 3), server.emit(1, 21, 22)
    assert chain(server.offer(0))[:2] == [4, 5] and server.offer(1) is None
    server.source.finished(0, False), server.source.finished(1, False)
    assert server.source.tokens == (len(PROMPT) + 3 if tenants else 0)


# -- what a match is worth ----------------------------------------------------------------------


def test_probabilities_follow_what_was_emitted() -> None:
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3)
    before = server.offer(0)
    assert before is not None and np.isclose(np.exp(before.trees.logprob[0]), START[0])
    for i in range(40):  # the first proposed token is always right and the second never
        server.emit(0, 4, 100 + i, 1, 2, 3)
        last = server.offer(0)
    assert last is not None
    f = np.exp(last.trees.logprob)
    assert chain(last)[0] == 4 and f[0] > 0.85
    assert len(f) == 1 or f[1] < 0.4 * f[0]


@pytest.mark.parametrize(("emitted", "tests_made"), [((99, 5, 6), 1), ((4, 99, 6), 2), ((4,), 1), ((), 0)])
def test_only_tokens_whose_parents_were_right_are_tested(emitted: tuple[int, ...], tests_made: int) -> None:
    server = Server()
    server.start(0, [*PROMPT, 1, 2], 3)
    server.offer(0)
    tests = list(server.source.rates.tests)
    server.emit(0, *emitted)
    tested = [a - b for a, b in zip(server.source.rates.tests, tests, strict=True)]
    assert sum(tested) == tests_made


def test_rates_fade_so_that_a_change_shows() -> None:
    rates = MatchRates()
    cell = rates.cells(1, True, True, 1)[0]
    for hit, expected in ((True, 1.0), (False, 0.0)):
        for _ in range(2000):
            rates.learn(cell, hit)
        assert rates.rate[cell] == pytest.approx(expected, abs=0.02)
    assert rates.rate[cell + PER_KIND] == START[1], "sampled requests are on their own"
    assert rates.rate[rates.cells(1, False, True, 1)[0]] == START[1] * OTHER


def test_cells_are_all_different() -> None:
    cells = [
        MatchRates.cells(order, longest, own, depth)[-1] + kind * PER_KIND
        for kind in range(KINDS)
        for order in range(len(START))
        for longest in (False, True)
        for own in (False, True)
        for depth in (1, 2, 3, 5, 9)
    ]
    assert sorted(cells) == list(range(len(MatchRates().rate)))


def test_a_quantile_is_where_the_noise_of_a_token_stands() -> None:
    keys, positions = np.array([3, 900], np.uint64), np.array([5, 6])
    u = quantile(keys[:, None], positions[:, None], np.arange(50)[None, :])
    assert np.allclose(np.exp(-np.exp(-gumbel(keys, positions, 50).astype(np.float64))), u, atol=1e-6)


@pytest.mark.parametrize("row", range(8))
def test_sampled_requests_are_told_by_their_noise(row: int) -> None:
    """Tokens whose own noise, at the position of their parent, favours them are proposed as likelier."""
    server = Server()
    server.start(row, [*PROMPT, 1, 2], 3)
    proposal = server.offer(row, temperature=0.8)
    position = np.array([len(PROMPT) + 2])
    quarter = int(quantile(np.array([17 + row], np.uint64), position, np.array([4]))[0] * 4)
    middle = (quarter + 0.5) / 4
    expected = middle ** ((1 - START[0]) / START[0])
    if expected < LEAST:
        assert proposal is None
    else:
        assert proposal is not None and np.exp(proposal.trees.logprob[0]) == pytest.approx(expected)

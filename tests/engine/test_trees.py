"""One iteration without SGLang: drafts against a brute-force beam search, the flat layout against decoding.

The verification's ``qo_indptr``, ``kv_indptr``, ``kv_indices`` and mask are what FlashInfer gets on a GPU;
here they go through plain dense attention and every node must see exactly its own path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.host.torch_forward import TorchBackend
from adaserve.engine.sources.beam import Draft, Drafter
from adaserve.engine.state import DecodeRows, RequestState
from adaserve.engine.trees import verify
from adaserve.scheduler.interface import IterationPlan, RunningBatch, Selection
from tests.engine.host.factories import Pool, hf_model, read_hf

MAX_NODES = 16
PROMPTS = [[5, 9, 2], [7] * 11, [101, 3, 55, 20, 77, 8]]
ROOTS = [40, 41, 42]


class DenseForward:
    """Plain dense attention over the plan's own lists; the forward of both models in these tests."""

    def __init__(self, model: Any) -> None:
        weights, config = read_hf(model)
        self.pool = Pool(config, len(weights.layers))
        self._backend = TorchBackend(weights, config, "fp32")

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        return self._backend.forward(tokens, positions, slots, self.pool.k, self.pool.v, plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def running(max_depth: list[int]) -> RunningBatch:
    n = len(max_depth)
    return RunningBatch(
        rids=tuple(str(i) for i in range(n)), slo_class=("default",) * n, tpot_slo_s=np.full(n, np.inf),
        decode_start_s=np.zeros(n), decoded_tokens=np.zeros(n, np.int64),
        context_tokens=np.array([len(p) for p in PROMPTS]), remaining_tokens=np.full(n, 99),
        max_depth=np.array(max_depth), temperature=np.ones(n),
    )  # fmt: skip


def decode_rows(forwards: list[DenseForward], behind: list[int], max_depth: list[int]) -> DecodeRows:
    """Prefilled requests; the draft (the last forward) has not seen the last ``behind[r]`` prompt tokens."""
    width = max(len(p) for p in PROMPTS) + 1 + MAX_NODES
    table = torch.tensor([forwards[0].pool.take(width) for _ in PROMPTS], dtype=torch.int32)
    states = []
    for r, prompt in enumerate(PROMPTS):
        seen = len(prompt) - behind[r]
        for forward, length in zip(forwards, [len(prompt)] * (len(forwards) - 1) + [seen], strict=True):
            _prefill(forward, prompt[:length], table[r, :length].long())
        states.append(RequestState(str(r), "default", np.inf, 0.0, draft_len=seen, pending=prompt[seen:]))
    return DecodeRows(
        states=states,
        seq_lens=np.array([len(p) for p in PROMPTS]),
        roots=np.array(ROOTS),
        pool_indices=torch.arange(len(PROMPTS)),
        req_to_token=table,
        running=running(max_depth),
    )


def _prefill(forward: DenseForward, tokens: list[int], slots: torch.Tensor) -> None:
    from adaserve.engine.trees.attention import causal_plan

    length = np.array([len(tokens)])
    if tokens:
        forward.hidden(
            torch.tensor(tokens), torch.arange(len(tokens)), slots, causal_plan(slots, length, length)
        )


def plan(rows: DecodeRows, depth: int, width: int, branching: tuple[int, ...] | None = None) -> IterationPlan:
    return IterationPlan(
        0, 0.0, rows.running, np.ones(len(rows)), depth, width, budget=1 << 20, branching=branching
    )


def unread(temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ones_like(temperature), np.zeros_like(temperature)


def drafted(model: Any, behind: list[int], max_depth: list[int], **shape: Any) -> tuple[Draft, DecodeRows]:
    draft_model, target = DenseForward(model), DenseForward(model)
    rows = decode_rows([target, draft_model], behind, max_depth)
    drafter = Drafter(draft_model, unread, MAX_NODES)
    draft = drafter.draft(plan(rows, **shape), rows, None)
    assert draft is not None
    return draft, rows


def path_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)


def beam_search(model: Any, prefix: list[int], depth: int, width: int) -> list[set[tuple[int, ...]]]:
    """The kept paths of every level, recomputed from scratch for each node."""
    levels: list[set[tuple[int, ...]]] = []
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        grown = {
            (*path, token): score + float(logprob)
            for path, score in beams.items()
            for token, logprob in enumerate(path_logprobs(model, [*prefix, *path]))
        }
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        levels.append(set(beams))
    return levels


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """Token path of every node of a row, in node order."""
    trees = draft.trees
    nodes = range(trees.row_start[row], trees.row_start[row + 1])
    out: list[tuple[int, ...]] = []
    for node in nodes:
        parent = int(trees.parent[node])
        out.append(((*out[parent],) if parent >= 0 else ()) + (int(trees.token[node]),))
    return out


@pytest.mark.parametrize("behind", [[0, 0, 0], [1, 0, 4], [3, 11, 2]])
def test_drafts_are_the_beam_search_of_a_fresh_prefill(behind: list[int]) -> None:
    """Also when the draft was kept from drafting for a while and has to catch up on some requests."""
    model = hf_model()
    draft, rows = drafted(model, behind, [4, 4, 4], depth=3, width=3)
    for r, prompt in enumerate(PROMPTS):
        found = paths(draft, r)
        by_level = [{p for p in found if len(p) == d} for d in (1, 2, 3)]
        assert by_level == beam_search(model, [*prompt, ROOTS[r]], 3, 3)
        for path, logprob in zip(found, draft.trees.logprob[draft.trees.row_start[r] :], strict=False):
            tokens = [*prompt, ROOTS[r], *path]
            exact = sum(
                float(path_logprobs(model, tokens[: i + len(prompt) + 1])[t]) for i, t in enumerate(path)
            )
            assert abs(exact - logprob) < 1e-3
        assert rows.states[r].draft_len == len(prompt) + 1 and not rows.states[r].pending


def test_only_rows_that_may_have_trees_are_drafted_for() -> None:
    draft, rows = drafted(hf_model(), [0, 0, 1], [2, 0, 3], depth=3, width=2)
    assert draft.rows.tolist() == [0, 2]
    assert np.diff(draft.trees.row_start).tolist() == [6, 0, 6]
    assert rows.states[1].draft_len == len(PROMPTS[1])


def test_a_shape_larger_than_the_window_is_cut() -> None:
    draft, _ = drafted(hf_model(), [0, 0, 0], [8, 8, 8], depth=8, width=3, branching=(1, 1, 3, 1, 1, 1, 1, 1))
    assert draft.depth == 6 and draft.nodes_per_row == 14 <= MAX_NODES


@pytest.mark.parametrize("shape", [dict(depth=3, width=3), dict(depth=4, width=2, branching=(2, 1, 2, 1))])
def test_the_flat_layout_equals_decoding_every_path(shape: dict[str, Any]) -> None:
    """Rows with trees of unequal size, one without any, nodes at scattered slots."""
    model = hf_model()
    target = DenseForward(model)
    draft_model = DenseForward(hf_model(seed=4))
    rows = decode_rows([target, draft_model], [0, 0, 0], [4, 0, 4])
    draft = Drafter(draft_model, unread, MAX_NODES).draft(plan(rows, **shape), rows, None)
    assert draft is not None
    keep = np.ones(draft.trees.n_nodes, np.bool_)
    keep[draft.trees.row_start[2] :] = draft.trees.depth[draft.trees.row_start[2] :] <= 2
    counts = np.add.reduceat(np.append(keep, False), draft.trees.row_start[:-1]) * (
        np.diff(draft.trees.row_start) > 0
    )
    batch = verify.build(rows, draft, Selection(keep, counts, counts, counts + 1.0))
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    logits = target.logits(target.hidden(tokens, positions, batch.slots, batch.plan))
    for i in range(len(batch.tokens)):
        path, at = [], i
        while at != batch.parent[at]:
            path.append(int(batch.tokens[at]))
            at = int(batch.parent[at])
        row = int(batch.row[i])
        assert batch.tokens[at] == ROOTS[row]
        exact = path_logprobs(model, [*PROMPTS[row], ROOTS[row], *reversed(path)])
        assert torch.allclose(logits[i].double().log_softmax(-1), exact, atol=1e-4)


def test_windows_of_one_row_never_share_a_slot() -> None:
    draft, rows = drafted(hf_model(), [0, 0, 0], [4, 4, 4], depth=4, width=3)
    every = np.concatenate(
        [draft.window.ravel(), rows.req_to_token[:, : min(map(len, PROMPTS))].numpy().ravel()]
    )
    assert len(np.unique(every)) == len(every)
    # The best beam of each level stands where an accepted path belongs, so it needs no move.
    first_of_level = [draft.shape.start[s] for s in range(draft.depth)]
    assert draft.shape.columns[first_of_level].tolist() == [1, 2, 3, 4]

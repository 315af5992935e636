"""Small builders shared by the scheduler's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from adaserve.scheduler.interface import (
    CandidateTrees,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
)


def running(n: int, **over: object) -> RunningBatch:
    """n ordinary requests; any field may be given as an array or a scalar."""
    fields: dict[str, object] = {
        "rids": tuple(f"r{i}" for i in range(n)),
        "slo_class": ("chat",) * n,
        "tpot_slo_s": 0.05,
        "decode_start_s": 0.0,
        "decoded_tokens": 10,
        "context_tokens": 200,
        "remaining_tokens": 100,
        "max_depth": 16,
        "temperature": 0.0,
    }
    fields.update(over)
    ints = {"decoded_tokens", "context_tokens", "remaining_tokens", "max_depth"}
    for name, value in fields.items():
        if name in ints or name in {"tpot_slo_s", "decode_start_s", "temperature"}:
            kind = np.int64 if name in ints else np.float64
            fields[name] = np.broadcast_to(np.asarray(value, kind), (n,)).copy()
    return RunningBatch(**fields)  # type: ignore[arg-type]


def trees_from(rows: Sequence[Sequence[tuple[int, float]]]) -> CandidateTrees:
    """Rows of (parent, one-step probability); parents first. Depth and path follow."""
    start, parent, depth, logprob = [0], [], [], []
    for row in rows:
        own_depth: list[int] = []
        own_path: list[float] = []
        for above, q in row:
            step = math.log(q) if q > 0 else -math.inf
            own_depth.append(1 if above < 0 else own_depth[above] + 1)
            own_path.append(step if above < 0 else own_path[above] + step)
        order = sorted(range(len(row)), key=lambda i: own_depth[i])
        place = {old: new for new, old in enumerate(order)}
        parent += [place[row[i][0]] if row[i][0] >= 0 else -1 for i in order]
        depth += [own_depth[i] for i in order]
        logprob += [own_path[i] for i in order]
        start.append(len(parent))
    m = len(parent)
    return CandidateTrees(
        np.array(start), np.zeros(m, np.int64), np.array(parent, np.int64), np.array(depth, np.int64),
        np.array(logprob, np.float64),
    )  # fmt: skip


def beam_trees(n: int, d: int, w: int, seed: int = 0) -> CandidateTrees:
    """n beams of d levels of w nodes, sorted within a level."""
    rng = np.random.default_rng(seed)
    parent = np.full((n, d * w), -1)
    log = np.zeros((n, d * w))
    for step in range(d):
        for j in range(w):
            col = step * w + j
            if step:
                parent[:, col] = rng.integers((step - 1) * w, step * w, n)
            above = log[np.arange(n), parent[:, col]] if step else 0.0
            log[:, col] = above + np.log(rng.beta(3, 1.5, n))
    depth = np.tile(np.repeat(np.arange(1, d + 1), w), n)
    return CandidateTrees(
        np.arange(n + 1) * d * w, np.zeros(n * d * w, np.int64), parent.ravel(), depth, log.ravel()
    )


PROBABILITY = st.one_of(
    st.sampled_from([1.0, 0.5, 0.25]), st.floats(0.001, 1.0, allow_nan=False, exclude_min=False)
)


@st.composite
def tree_rows(draw: st.DrawFn, max_rows: int = 4, max_nodes: int = 7) -> list[list[tuple[int, float]]]:
    """Random rows; sibling probabilities need not sum to 1, which the algorithms never use."""
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        size = draw(st.integers(0, max_nodes))
        rows.append([(draw(st.integers(-1, i - 1)), draw(PROBABILITY)) for i in range(size)])
    return rows


def kept_sets(trees: CandidateTrees, selection: Selection) -> list[set[int]]:
    """Kept node indices per row."""
    return [
        {int(i) for i in np.flatnonzero(selection.keep[a:b])}
        for a, b in zip(trees.row_start[:-1], trees.row_start[1:], strict=True)
    ]


def outcome(
    plan: IterationPlan, trees: CandidateTrees, selection: Selection, accepted: np.ndarray, **over: float
) -> IterationOutcome:
    """An outcome with plausible times."""
    n = len(plan.running)
    row = np.repeat(np.arange(n), np.diff(trees.row_start))
    times = {"end_s": plan.now_s + 0.06, "draft_s": 0.01, "select_s": 0.0, "verify_s": 0.05, "total_s": 0.06}
    times.update(over)
    new = 1 + np.bincount(row, weights=accepted, minlength=n).astype(np.int64)
    return IterationOutcome(plan, trees, selection, accepted, new, **times)

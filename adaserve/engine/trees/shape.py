"""Shapes of candidate trees: where each node's KV lives and which nodes it sees.

A request's window is the ``1 + nodes`` KV slots from position ``L`` on: column 0 holds the root,
the best beam of depth s stands at column s, all other nodes after these. So when the likeliest path is
accepted, as it mostly is, its KV already lies where committed tokens belong and nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

ANY_DEPTH = 1 << 30
"""Of a source that can draft as deep as it is asked to."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """Beams per draft step; node j of a row is (step, beam) in step-major order."""

    beams: tuple[int, ...]  # beams kept after each step
    start: tuple[int, ...]  # first node of each step, and the node count at the end
    columns: np.ndarray  # int64 [nodes]: window column of each node
    depth: np.ndarray  # int64 [nodes]: 1-based
    is_branching: bool  # every beam has the same number of children, instead of competing for places

    @property
    def nodes(self) -> int:
        return self.start[-1]

    @property
    def children(self) -> int:
        """Of one node, at most."""
        if not self.is_branching:
            return self.beams[0]
        return max(now // before for before, now in pairwise((1, *self.beams)))

    @property
    def width(self) -> int:
        """Columns of the window, root included."""
        return 1 + self.nodes


@lru_cache(maxsize=256)
def tree_shape(depth: int, width: int, branching: tuple[int, ...] | None) -> TreeShape:
    """The shape for a beam search (depth, width) or for SpecInfer's fixed branching."""
    if branching is None:
        beams = (width,) * depth
    else:
        beams = tuple(int(np.prod(branching[: s + 1])) for s in range(len(branching)))
    start = (0, *np.cumsum(beams).tolist())
    columns = np.empty(start[-1], np.int64)
    free = len(beams) + 1
    for step, count in enumerate(beams):
        columns[start[step]] = step + 1
        columns[start[step] + 1 : start[step + 1]] = np.arange(free, free + count - 1)
        free += count - 1
    depths = np.repeat(np.arange(1, len(beams) + 1), beams)
    return TreeShape(beams, start, columns, depths, branching is not None)


@lru_cache(maxsize=256)
def laid_out(
    shape: TreeShape, steps: int, n: int, active: bytes
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all nodes that ``steps`` make for the rows ``active`` (int64) of n, not to be written: where each
    row's begin, int64 [n + 1], depths and columns, int64 [rows * nodes] each."""
    rows, nodes = np.frombuffer(active, np.int64), shape.start[steps]
    row_start = np.zeros(n + 1, np.int64)
    row_start[1 + rows] = nodes
    depth, column = (np.tile(values[:nodes], len(rows)) for values in (shape.depth, shape.columns))
    found = row_start.cumsum(), depth, column
    for values in found:
        values.flags.writeable = False
    return found

"""The levels of a beam search, in torch on any device: nothing here waits for the device.

Candidates are chosen by path probability (AdaServe, Algorithm 2 line 8), or every beam keeps the same
number of children where a shape says so (SpecInfer's fixed branching).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.trees.shape import TreeShape


class Levels:
    """Candidates of a rows, filled in level by level; nodes stand in the shape's order.

    ``columns``: the shape's, int64 [nodes] on the device.
    """

    def __init__(self, shape: TreeShape, a: int, columns: Tensor, room: Tensor | None = None) -> None:
        """``room``: int64 [3, a, nodes], where a graph leaves them. Memory that is made inside of one is
        written to by others."""
        self.shape = shape
        nodes, device = shape.nodes, columns.device
        # No number assigned at indices: torch sends it to a GPU first and waits, which cannot be captured.
        own = columns[:, None] == torch.arange(shape.width, device=device)
        self.visible = own.repeat(a, 1, 1)
        """bool [a, nodes, width]: window columns that a node sees; itself from the start."""
        self.found = torch.zeros(3, a, nodes, dtype=torch.int64, device=device) if room is None else room
        """The three below, so that one copy brings them to the host."""
        self.tokens, self.parents = self.found[0], self.found[1].fill_(-1)
        self.logprobs = self.found[2].view(torch.float64)

    def level(self, step: int) -> slice:
        """Nodes that step ``step`` (1-based) makes."""
        return slice(self.shape.start[step - 1], self.shape.start[step])

    def start(self, logprob: Tensor, token: Tensor) -> None:
        """The roots' best children: [a, K] each, best first."""
        beams = self.shape.beams[0]
        self.logprobs[:, :beams] = logprob[:, :beams]
        self.tokens[:, :beams] = token[:, :beams]
        self.visible[:, :beams, 0] = True

    def parents_of(self, step: int) -> Tensor:
        """int64 [a, beams]: the parent of each beam of depth ``step`` - 1, counted within its own level; the
        root's level has one."""
        parents = self.parents[:, self.level(step - 1)]
        return torch.zeros_like(parents) if step == 2 else parents - self.level(step - 2).start

    def children(self, step: int) -> int:
        """Candidates that each beam before ``step`` offers."""
        shape, before = self.shape, self.level(step - 1)
        if shape.is_branching:
            return shape.beams[step - 1] // (before.stop - before.start)
        return min(shape.beams[step - 1], shape.beams[0])

    def grow(self, step: int, logprob: Tensor, token: Tensor) -> None:
        """Keeps the best of what the beams of depth ``step`` - 1 offer: [a, beams, K] each, best first."""
        before, now, children = self.level(step - 1), self.level(step), self.children(step)
        beams = now.stop - now.start
        paths = (self.logprobs[:, before, None] + logprob[..., :children]).flatten(1)
        if self.shape.is_branching:
            best = torch.arange(beams, device=paths.device).expand(len(paths), -1)
        else:
            paths, best = paths.topk(beams, dim=1)
        parent = torch.div(best, children, rounding_mode="floor") + before.start
        self.logprobs[:, now] = paths
        self.tokens[:, now] = token[..., :children].flatten(1).gather(1, best)
        self.parents[:, now] = parent
        width = self.visible.shape[2]
        above = self.visible.gather(1, parent[:, :, None].expand(-1, -1, width))
        self.visible[:, now].logical_or_(above)

    def frontier(self, step: int) -> np.ndarray:
        """Path log-probabilities of a level, float64 [a, beams]; on a CPU only."""
        return self.logprobs[:, self.level(step)].numpy()

"""The kernel that chooses a level's beams: in Triton's interpreter against torch, and what is compiled."""

from __future__ import annotations

from tests.engine.gpu.scripts import python

CHECK = """
import torch
from adaserve.bench.gpu_check.kernels import check_beams
from adaserve.engine.gpu.grow_kernel import grow_fused
from adaserve.engine.beam_levels import Levels
from adaserve.engine.trees.shape import tree_shape

for depth, width in ((1, 3), (5, 1), (4, 2), (5, 3), (8, 8), (2, 16)):
    found = check_beams(3, depth, width, torch.device("cpu"))
    assert found["right"], found

# Of equal paths the first ones are taken; what is not a number comes last, and no token twice.
nan, shape = float("nan"), tree_shape(2, 2, None)
for offer, tokens, parents in (
    ([[0.0, 0.0], [0.0, 0.0]], [10, 11], [0, 0]),
    ([[-1.0, nan], [nan, -2.0]], [10, 13], [0, 1]),
    ([[nan, nan], [nan, nan]], [10, 11], [0, 0]),
):
    levels = Levels(shape, 1, torch.from_numpy(shape.columns))
    levels.start(torch.zeros(1, 2), torch.tensor([[7, 8]]))
    token = torch.tensor([[[10, 11], [12, 13]]])
    logprob = torch.tensor([offer])
    grow_fused(levels.found, levels.visible, logprob, token, levels.level(1), levels.level(2), 2)
    assert levels.tokens.tolist() == [[7, 8, *tokens]] and levels.parents.tolist() == [[-1, -1, *parents]]
"""


COMPILED = """
import torch
from adaserve.engine.gpu.grow_kernel import PART, _block, _grow
from tests.engine.gpu.compiling import compiles_once, kind_of, spilled_bytes

cases = []
found, visible = torch.zeros(3, 4, 15, dtype=torch.int64), torch.zeros(4, 15, 16, dtype=torch.uint8)
for width, start in ((1, 1), (3, 0), (16, 1)):
    logprob, token = torch.zeros(99)[start:], torch.zeros(99, dtype=torch.int64)[start:]
    numbers = (9, 3, 1, 9, 3, 1, 60, 15, 16, 0, width, width, width, width)
    tensors = found, found.double(), visible, logprob, token
    cases.append((*tensors, *numbers, _block(9), _block(16), 16))
assert compiles_once(_grow, *cases)
widest = kind_of(_grow, *cases[-1][:-3], _block(16 * 16), _block(1 + 5 * 16), PART)
assert spilled_bytes(_grow, widest, num_warps=16) < 1000
"""


def test_the_same_beams() -> None:
    python(CHECK, interpret=True)


def test_the_kernel_compiles_once_for_all_levels() -> None:
    """And for compute capability 9.0."""
    python(COMPILED, interpret=False)

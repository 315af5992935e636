"""The kernels that accept tokens and say where they belong: in Triton's interpreter, and what is compiled."""

from __future__ import annotations

from tests.engine.gpu.scripts import python

CHECK = """
import torch
from adaserve.bench.gpu_check.accept_kernels import check_accept

accepted = 0
for case in ((1, 15, 5), (64, 15, 5), (5, 90, 8), (3, 1, 1), (2, 40, 20), (1, 0, 3)):
    found = check_accept(*case, torch.device("cpu"))
    assert found["right"], found
    accepted += found["accepted"]
assert accepted > 60
"""

COMPILED = """
import torch
from adaserve.engine.gpu.accept_kernel import BLOCK, _accept, _moves, _places
from tests.engine.gpu.compiling import compiles_once

numbers, table = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
bools = torch.zeros(64, dtype=torch.uint8)
accepts, moves = [], []
for start, size, deepest in ((0, 16, 1), (1, 1, 8)):
    some, marks = numbers[start:], bools[start:]
    accepts.append((some, some, some, marks, some, some, size, size, 2 * size, deepest, 9, BLOCK, _places(9)))
    rest = size, size, deepest, 16 + start, 0, BLOCK, _places(deepest)
    moves.append((some, some, some, marks, table, some, *rest))
assert compiles_once(_accept, *accepts) and compiles_once(_moves, *moves)
"""


def test_the_same_paths() -> None:
    python(CHECK, interpret=True)


def test_each_kernel_compiles_once() -> None:
    """And for compute capability 9.0."""
    python(COMPILED, interpret=False)

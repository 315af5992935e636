"""The kernel that moves accepted paths: in Triton's interpreter, and what it is compiled for."""

from __future__ import annotations

from tests.engine.gpu.scripts import python

CHECK = """
import torch
from adaserve.bench.gpu_check.kernels import check_moves
from adaserve.engine.gpu.move_kernel import BLOCK, PathMover

for paths, deepest, sizes in (
    (3, 4, (32, 16)),  # keys and values of different size
    (4, 1, (4 * BLOCK + 4,)),  # more words than one program moves
    (5, 7, (12, 4, 12)),
):
    found = check_moves(paths, deepest, sizes, torch.device("cpu"))
    assert found["moved"] and found["right"], found
try:
    PathMover([torch.zeros(4, 3).half()])
except ValueError as error:
    assert "[6] bytes" in str(error)
else:
    raise AssertionError("entries of 6 bytes were taken")
"""


COMPILED = """
import torch
from adaserve.engine.gpu.move_kernel import BLOCK, _move
from tests.engine.gpu.compiling import compiles_once

numbers = torch.zeros(64, dtype=torch.int64)
assert compiles_once(_move, *(
    (numbers, numbers, numbers[start:], numbers[start:], path, step, path, step, deepest, BLOCK)
    for start, path, step, deepest in ((0, 16, 1, 16), (1, 3, 2, 1))
))
"""


def test_paths_are_moved() -> None:
    python(CHECK, interpret=True)


def test_the_kernel_compiles_once_whatever_the_trees() -> None:
    """Slots start anywhere in an upload, at any distance; a request would wait for a compiler otherwise."""
    python(COMPILED, interpret=False)

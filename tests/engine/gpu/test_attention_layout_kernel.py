"""The kernels that list slots and hide windows: in Triton's interpreter against the host's code, and, as that
of attention, what is compiled."""

from __future__ import annotations

from tests.engine.gpu.scripts import python

CHECK = """
import torch
from adaserve.bench.gpu_check.kernels import check_layout
from adaserve.engine.gpu import attention_layout_kernel as kernel

for kernel.BLOCK in (1024, 4):  # a list that one program has at once, and one that it has not
    for sizes in ((1, 40, 3), (5, 90, 17), (3, 150, 70)):
        found = check_layout(*sizes, torch.device("cpu"))
        assert found["right"], found
"""


COMPILED = """
import torch
from adaserve.engine.gpu.attention_kernel import _attend
from adaserve.engine.gpu.attention_layout_kernel import _change, _list
from tests.engine.gpu.compiling import compiles_once

words, table, numbers = (torch.zeros(64, dtype=kind) for kind in (torch.int32, torch.int32, torch.int64))
bools = torch.zeros(64, dtype=torch.bool)
lists = [(table, numbers[start:], words, stride, 0, 1024) for start, stride in ((0, 16), (1, 17))]
windows = [
    (words, numbers[start:], bools[start:], stride, start, 1, width, 32, False)
    for start, stride, width in ((0, 16, 16), (1, 0, 3))
]
half, floats = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
def attention(rows, scores):
    for start, stride, width in ((0, 16, 16), (1, 0, 3)):
        tiles = positions = sinks = table[start:]
        if scores:
            positions, sinks = numbers[start:], half[start:]
        yield (
            half, half, half, half, words, tiles, numbers[start:], bools.byte()[start:], floats, words,
            positions, sinks, 0.5, 9.0 * scores, 16 * scores + start, 6144, 64, 1024, 64, 1024, 64, stride,
            start, 1, 1 + start, width, 4, 64, 64, rows, 64, scores, scores, scores,
        )

assert compiles_once(_list, *lists) and compiles_once(_change, *windows)
assert all(compiles_once(_attend, *attention(*kind)) for kind in ((16, False), (64, False), (16, True)))
"""


def test_the_same_as_the_host() -> None:
    python(CHECK, interpret=True)


def test_each_kernel_compiles_once() -> None:
    """And for compute capability 9.0; attention for plain scores, and for all that a layer may ask."""
    python(COMPILED, interpret=False)

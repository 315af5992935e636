"""The kernels that list slots and hide windows: in Triton's interpreter against the host's code; and of these
and others, what is compiled."""

from __future__ import annotations

import json

from tests.engine.gpu.scripts import python

CHECK = """
import torch
from adaserve.bench.gpu_check.kernels import check_layout
from adaserve.engine.gpu import layout_kernel

for layout_kernel.BLOCK in (1024, 4):  # a list that one program has at once, and one that it has not
    for sizes in ((1, 40, 3), (5, 90, 17), (3, 150, 70)):
        found = check_layout(*sizes, torch.device("cpu"))
        assert found["right"], found
"""


KINDS = """
import inspect, json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

hopper = GPUTarget("cuda", 90, 32)

def kinds(kernel, *cases):
    bind = create_function_from_signature(inspect.signature(kernel.fn), kernel.params, make_backend(hopper))
    found = [bind(*case)[1] for case in cases]
    fixed = {name: value for name, (kind, value) in zip(kernel.arg_names, found[0]) if kind == "constexpr"}
    signature = {name: kind for name, (kind, _) in zip(kernel.arg_names, found[0])}
    assert compile(ASTSource(kernel, signature, fixed), hopper).asm["cubin"]
    return found
"""
"""Compiles a kernel for Hopper, and says what each case would be compiled for."""

COMPILED = f"""{KINDS}
from adaserve.engine.gpu.attention_kernel import _attend
from adaserve.engine.gpu.follow_kernel import _begin, _shorten
from adaserve.engine.gpu.layout_kernel import _change, _list

words, table, numbers = (torch.zeros(64, dtype=kind) for kind in (torch.int32, torch.int32, torch.int64))
bools = torch.zeros(64, dtype=torch.bool)
lists = [(table, numbers[start:], words, stride, 0, 1024) for start, stride in ((0, 16), (1, 17))]
windows = [
    (words, numbers[start:], bools[start:], stride, start, 1, width, 32, False)
    for start, stride, width in ((0, 16, 16), (1, 0, 3))
]
half, floats = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
attention = [
    (half, half, half, half, words, table[start:], numbers[start:], bools.byte()[start:], floats, words, 0.5,
     6144, 64, 1024, 64, 1024, 64, stride, start, 1, 1 + start, width, 4, 64, 64, rows, 64)
    for start, stride, width, rows in ((0, 16, 16, 16), (1, 0, 3, 16))
]
kinds(_attend, (*attention[0][:25], 64, *attention[0][26:]))
early = [
    (*(numbers[start:] for _ in range(10)), 5 + 11 * start, 16 - start, 1 + start, 2 + 3 * start, 5)
    for start in (0, 1)
]
tiles = [(table[start:], numbers[start:], 1 + 15 * start, 5) for start in (0, 1)]
found = [kinds(_list, *lists), kinds(_change, *windows), kinds(_attend, *attention)]
print(json.dumps([*found, kinds(_begin, *early), kinds(_shorten, *tiles)]))
"""


def test_the_same_as_the_host() -> None:
    python(CHECK, interpret=True)


def test_each_kernel_compiles_once() -> None:
    """And for compute capability 9.0."""
    for first, second in json.loads(python(COMPILED, interpret=False)):
        assert first == second

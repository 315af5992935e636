"""SGLang's kernel that lists new KV slots: all its kinds are compiled before the first request."""

from __future__ import annotations

import json

from tests.engine.gpu.scripts import python

KINDS = """
import inspect, json, torch
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from adaserve.engine.gpu.device import listings_of_none

kernel = assign_req_to_token_pool
bind = create_function_from_signature(
    inspect.signature(kernel.fn), kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

def kind(rows, table, starts, ends, slots, count):
    return bind(rows, table, starts, ends, slots, table.shape[1], next_power_of_2(count))[1]

table = torch.arange(80, dtype=torch.int32).view(5, 16)
before = table.clone()
compiled = [kind(*arguments) for arguments in listings_of_none(table, 50)]
served = []
free = torch.arange(1000)  # slots, of which the first free ones are taken
for count, taken in ((1, 0), (3, 5), (4, 8), (17, 40), (50, 333)):
    rows, lens = torch.arange(count), torch.zeros(count, dtype=torch.int32)
    served.append(kind(rows, table, lens, lens + 3, free[taken:], count))
takes = [int((ends - starts).sum()) for _, _, starts, ends, _, _ in listings_of_none(table, 50)]
print(json.dumps([compiled, served, takes]))
"""


def test_every_kind_is_compiled_at_the_start() -> None:
    compiled, served, takes = json.loads(python(KINDS, interpret=False).splitlines()[-1])
    assert all(kind in compiled for kind in served) and not any(takes)
    assert len(compiled) == 2 * 7, "1, 2, 4 .. 64 requests, each with slots at two kinds of places"

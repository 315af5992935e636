"""SGLang's kernel that lists new KV slots: all its kinds are compiled before the first request."""

from __future__ import annotations

import json

from tests.engine.gpu.scripts import python

KINDS = """
import json, torch
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool, next_power_of_2
from adaserve.engine.gpu.device import listings_of_none
from tests.engine.gpu.compiling import kind_of

def kind(rows, table, starts, ends, slots, count):
    sizes = table.shape[1], next_power_of_2(count)
    return kind_of(assign_req_to_token_pool, rows, table, starts, ends, slots, *sizes)

table = torch.arange(80, dtype=torch.int32).view(5, 16)
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

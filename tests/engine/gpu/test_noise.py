"""The device's noise is the host's: the same hash, bit for bit, and the same numbers but for rounding."""

from __future__ import annotations

import json

import numpy as np
import torch

from adaserve import noise as host
from adaserve.engine.cpu.noise import transformed
from adaserve.engine.gpu import noise
from adaserve.engine.logits.logit_transform import LogitTransform
from tests.engine.gpu.scripts import python

ROWS, VOCABULARY = 72, 5000
EVERY = torch.arange(VOCABULARY, dtype=torch.int32)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Keys of all 64 bits, the extremes too, and positions from 0 on."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 64, ROWS, dtype=np.uint64)
    keys[:3] = 0, (1 << 64) - 1, 1 << 63
    positions = rng.integers(0, 1 << 17, ROWS)
    positions[:5] = 0, 0, 7, 7, 1 << 31
    return keys, positions


def on_device(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int64))


def test_the_hosts_numbers() -> None:
    keys, positions = rows()
    right = torch.from_numpy(host.gumbel(keys, positions, VOCABULARY))
    got = noise.gumbel(on_device(keys), torch.from_numpy(positions), EVERY)
    assert got.dtype == torch.float32 and got.shape == right.shape
    high = right > -2.0  # all that can decide a draw; below, fp32 has few numbers left to round to
    assert high.float().mean() > 0.99
    torch.testing.assert_close(got[high], right[high], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got, right, rtol=0, atol=0.3)


def test_it_is_gumbel_noise() -> None:
    """Mean, variance and tail; and rows have nothing to do with each other."""
    keys, positions = rows()
    values = noise.gumbel(on_device(keys), torch.from_numpy(positions), EVERY).double()
    assert abs(float(values.mean()) - 0.5772) < 0.01 and abs(float(values.var()) - 1.6449) < 0.03
    assert abs(float((values > 5).double().mean()) - 0.006715) < 0.001
    off_diagonal = torch.corrcoef(values) - torch.eye(ROWS)
    assert float(off_diagonal.abs().max()) < 0.08
    one = torch.full((3,), 5), torch.arange(3)
    assert float((torch.corrcoef(noise.gumbel(*one, EVERY)) - torch.eye(3)).abs().max()) < 0.06


def test_reading() -> None:
    keys, positions = rows()
    logits = torch.randn(ROWS, 131, generator=torch.Generator().manual_seed(0))
    scale, spread = np.linspace(0.5, 2, ROWS, dtype=np.float32), np.zeros(ROWS, np.float32)
    spread[::2] = 0.8
    right = transformed(logits, LogitTransform(scale, spread, keys, positions))
    columns = (torch.from_numpy(c) for c in (scale, spread))
    got = noise.transformed(logits.half().float(), *columns, on_device(keys), torch.from_numpy(positions))
    torch.testing.assert_close(got, right, rtol=1e-3, atol=4e-3)
    assert got.argmax(-1).tolist() == right.argmax(-1).tolist()


def test_a_head_reads_the_noise_of_the_tokens_that_it_knows() -> None:
    keys, positions = (torch.from_numpy(v) for v in (rows()[0].view(np.int64), rows()[1]))
    ones, words = torch.ones(ROWS), torch.tensor([4999, 3, 700])
    every = noise.transformed(torch.zeros(ROWS, VOCABULARY), ones, ones, keys, positions)[:, words]
    logprobs, columns = noise.best(torch.zeros(ROWS, 3), ones, ones, keys, positions, words, 3)
    assert torch.equal(columns, every.argsort(dim=1, descending=True))
    torch.testing.assert_close(logprobs, every.log_softmax(dim=1).gather(1, columns))


KERNEL = """
import json, sys
import numpy as np, torch
from adaserve.engine.gpu import noise
from adaserve.engine.gpu.noise_kernel import BLOCK, best_fused, transform_fused
from tests.engine.gpu.test_noise import on_device, rows
keys, positions = rows()
keys, positions = on_device(keys), torch.from_numpy(positions)
spread = torch.full((len(keys),), 0.8)
spread[1::3] = 0
scale = torch.linspace(0.5, 2, len(keys))
worst = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits = torch.randn(len(keys), 1300, generator=torch.Generator().manual_seed(0)).to(dtype)
    right = noise.transformed(logits, scale, spread, keys, positions)
    got = transform_fused(logits, scale, spread, keys, positions)
    assert got.dtype == torch.float32 and torch.equal(got[1::3], right[1::3]), "there is no noise in these"
    assert torch.equal(got.argmax(-1), right.argmax(-1))
    worst.append(float((got - right).abs().max()))
none = torch.zeros(len(keys), 1300), scale, torch.ones(len(keys)), keys, positions
words = torch.randperm(128_000, generator=torch.Generator().manual_seed(1))[:1300]
worst.append(float((noise.transformed(*none) - transform_fused(*none)).abs().max()))
for some in (None, words):
    for count in (1, 3, 8):
        few = [values[:9] for values in none]
        (right, columns), (got, at) = (make(*few, some, count) for make in (noise.best, best_fused))
        assert torch.equal(columns, at) and at.dtype == torch.int64
        worst.append(float((right - got).abs().max()))
# The best may all be in one block, or in the last one's few columns; of equal ones the first is taken.
logits = torch.zeros(4, 2 * BLOCK + 3)
logits[0, 5:9], logits[1, -2:], logits[2, [7, BLOCK + 1]] = 9.0, 8.0, 7.0
columns = (c[:4] for c in (torch.ones(len(keys)), torch.zeros(len(keys)), keys, positions))
logprob, at = best_fused(logits, *columns, None, 3)
assert at.tolist() == [[5, 6, 7], [2 * BLOCK + 1, 2 * BLOCK + 2, 0], [7, BLOCK + 1, 0], [0, 1, 2]]
worst.append(float((logprob - logits.log_softmax(-1).gather(1, at)).abs().max()))
# What is not a number is worth nothing, and stands for no token beyond the vocabulary.
logits = torch.full((3, 300), torch.nan)
logits[1, 7], logits[2] = 1.0, torch.inf
logprob, at = best_fused(logits, *(c[:3] for c in (torch.ones(9), torch.zeros(9), keys, positions)), None, 3)
assert 0 <= at.min() and at.max() < 300 and at[1, 0] == 7
assert logprob.exp().tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
print(json.dumps(worst))
"""


COMPILED = """
import torch
from adaserve.engine.gpu.noise_kernel import BLOCK, _best_of_block, _best_of_row, _read_row
from tests.engine.gpu.compiling import compiles_once, kind_of

logits, whole, reads, bests = torch.zeros(4, 1024), torch.zeros(4, dtype=torch.int32), [], []
for start in (0, 1):  # at the start of 64 bytes, and behind one number
    floats, ints = torch.zeros(64)[start:], torch.zeros(64, dtype=torch.int64)[start:]
    columns, sizes = (floats, floats, ints, ints), (*logits.stride(), 1024)
    reads.append((logits, logits, *columns, *sizes, BLOCK))
    bests.append((logits, logits, whole, logits, *columns, ints, *sizes, 3, BLOCK, False))
assert compiles_once(_read_row, *reads) and compiles_once(_best_of_block, *bests)
assert compiles_once(_best_of_row, (logits, whole, logits, logits, ints, 126, 3, 128, 512))
assert tuple(kind_of(_read_row, *reads[0])[0]) == ("*fp32", "D"), "read in large words all the same"
"""


def test_the_kernels_compile_once_wherever_their_columns_start() -> None:
    """A request that samples would wait for a compiler otherwise: Triton asks whether pointers are multiples
    of 16 bytes, which those into an upload are by chance."""
    python(COMPILED, interpret=False)


def test_the_kernel_reads_the_same_numbers() -> None:
    worst = json.loads(python(KERNEL, interpret=True))
    # Noise reaches 22, where a unit in the last place is 2e-6; the hash has to be the same bit for bit.
    assert max(worst) < 4e-6

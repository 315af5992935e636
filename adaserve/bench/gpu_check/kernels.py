"""The attention kernels of tree forwards against SDPA, and those of noise, filters, moves, beams and SGLang
itself against torch, at the sizes that are served; compiles them, too.

``python -m adaserve.bench.gpu_check.kernels --out kernels.json``: every kernel runs in a process of its own,
all at once, so that their compilers share the host's cores and one that fails does not cost the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.bench.gpu_check import sglang_kernels
from adaserve.bench.gpu_check.accept_kernels import check_accept
from adaserve.bench.gpu_check.draft_search import Recorded, check_search
from adaserve.bench.gpu_check.flashinfer_kernels import compile_all, specs
from adaserve.bench.gpu_check.follow_kernels import check_follow
from adaserve.bench.gpu_check.unread_kernel import check_unread
from adaserve.config import GPU_WIDTH
from adaserve.engine.beam_levels import Levels
from adaserve.engine.gpu import noise
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TreeKernel, set_out
from adaserve.engine.gpu.attention_layout import Extent, change_tree_mask, list_slots, slot_lists
from adaserve.engine.gpu.attention_layout_kernel import change_fused, list_fused
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.filter_kernel import filter_fused
from adaserve.engine.gpu.flashinfer_kernel import INT_WORKSPACE_BYTES, FlashInferKernel
from adaserve.engine.gpu.flashinfer_planner import WORKSPACE_BYTES
from adaserve.engine.gpu.grow_kernel import grow_fused
from adaserve.engine.gpu.kernel_choice import own_kernel
from adaserve.engine.gpu.move_kernel import PathMover
from adaserve.engine.gpu.noise_kernel import best_fused, transform_fused
from adaserve.engine.logits.filters import Filter, by_sort, differences, examples
from adaserve.engine.trees.attention import Scores
from adaserve.engine.trees.batch import ContextGap
from adaserve.engine.trees.shape import tree_shape
from adaserve.engine.trees.verify import SCRATCH_SLOT
from adaserve.host.processes import end_children
from adaserve.scheduler.config import NARROW

ATTENTION = ("flashinfer", "triton")
OTHERS = ("layout", "noise", "moves", "beams")
OPTIONAL = {
    "filters": "servers sort instead",
    "sglang": "every server computes wrong results, unless SGLANG_FORCE_FUSED_OP_BACKEND=torch is set",
    "prefills": "every server needs --disable-prefill-cuda-graph, or may fail when it captures prefills",
    "writes": "torch writes KV where that does not compile, and SGLang's own speculation may not run",
}
"""What to know where they are wrong. Servers can do without."""
KERNELS = (*ATTENTION, *OTHERS, *OPTIONAL)
NEED_A_GPU = ("flashinfer", "sglang", "prefills", "writes")
TYPES = {"fp16": (torch.float16, 4e-3), "bf16": (torch.bfloat16, 3e-2), "fp32": (torch.float32, 1e-4)}
"""Types, and the largest difference from SDPA in fp32 that rounding explains."""
KEPT = {"fp8_e4m3": torch.float8_e4m3fn}
"""Types of keys and values that models don't compute in."""


@dataclass(frozen=True)
class Case:
    """``rows`` requests of ``queries`` tokens over ``context`` cached ones. Of each other they see some, by
    chance. ``window``, ``cap`` and whether there are ``sinks``: of ``Scores``. ``kept``: the type of keys and
    values, where it is another one. ``beside``: tokens of one more request, as when a prompt is read in a
    verification; 0 = there is none."""

    rows: int
    queries: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    kept: str = ""
    beside: int = 0

    @property
    def extent(self) -> Extent:
        q_lens = np.full(self.rows, self.queries)
        if self.beside:
            q_lens = np.append(q_lens, self.beside)
        return Extent(q_lens, q_lens + self.context)


LLAMA, WIDENED = (32, 8, 128), (32, 16, 64)
"""Heads of Llama 3.1 8B, and of the embedded target widened to its cost."""
SHAPES = (
    (1, 3, 150), (8, 3, 150), (32, 4, 150), (64, 4, 150), (1, 1, 500), (1, 16, 500), (64, 1, 1000),
    (16, 4, 1000), (64, 8, 1000), (1, 12, 3000), (1, 500, 150), (12, 40, 500),
)  # fmt: skip
EVERY = (
    *(
        Case(*shape, *heads, dtype)
        for heads in (WIDENED, LLAMA)
        for dtype in ("fp16", "bf16")
        for shape in SHAPES
    ),
    Case(8, 3, 1000, *WIDENED, "fp16", beside=400),
    Case(32, 4, 150, *LLAMA, "bf16", beside=500),
)
OF_TRITON = (
    Case(8, 3, 1500, *WIDENED, "fp16", window=512),
    Case(1, 12, 3000, *WIDENED, "fp16", window=1024, cap=50.0),
    Case(16, 4, 1000, *WIDENED, "fp16", window=127, sinks=True),
    Case(16, 4, 1000, *WIDENED, "fp16", kept="fp8_e4m3"),
    Case(16, 4, 1000, *LLAMA, "bf16", kept="fp8_e4m3"),
)
"""As in layers of Gemma 3, Gemma 2 and GPT-OSS, and with a KV cache in 8 bits; for Triton alone."""
SERVED = tuple(c for c in EVERY if (c.q_heads, c.kv_heads, c.head_dim, c.dtype) == (*WIDENED, "fp16"))
"""By the embedded pairs."""
SMALL = (
    Case(3, 2, 20, 4, 2, 32, "fp32"),
    Case(2, 5, 9, 4, 2, 32, "fp16"),
    Case(2, 3, 30, 4, 2, 32, "fp32", window=9, cap=2.0, sinks=True),
    Case(3, 2, 20, 4, 2, 32, "fp32", kept="fp8_e4m3"),
    Case(3, 2, 20, 4, 2, 32, "fp32", beside=40),
)
"""For Triton's interpreter on a CPU."""


def check(name: str, case: Case, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """The largest difference from SDPA, eagerly and (on a GPU) from a graph, and the time of a run there."""
    dtype, bound = TYPES[case.dtype]
    generator = torch.Generator().manual_seed(seed)
    extent = case.extent
    tokens, pool, rows = int(extent.q_lens.sum()), int(extent.kv_lens.sum()) + 1, len(extent.q_lens)
    wide = case.q_heads + 2 * case.kv_heads  # queries come beside keys and values, as models compute them
    q, keys, values = (
        torch.randn(n, heads, case.head_dim, generator=generator).to(device, dtype)
        for n, heads in ((tokens, wide), (pool, case.kv_heads), (pool, case.kv_heads))
    )
    q, keys, values = q[:, : case.q_heads], keys.to(_kept(case)), values.to(_kept(case))
    buffers = AttentionBuffers.allocate(pool - 1, int(extent.byte_starts[-1]), device)
    buffers.kv_indices.copy_(torch.randperm(pool - 1, generator=generator) + 1)
    width = int(extent.q_lens.max())
    seen = (torch.rand(tokens, width, generator=generator) < 0.5).numpy()
    seen |= np.arange(width) < (width - extent.q_lens.repeat(extent.q_lens))[:, None]
    ends, there = (torch.from_numpy(x).to(device)[None] for x in (extent.window_ends, seen))
    reference, kernel = SdpaKernel(buffers), _kernel(name, case, buffers, rows)
    sinks = torch.randn(case.q_heads, generator=generator).to(device) if case.sinks else None
    scores = Scores(case.head_dim**-0.5, case.window, case.cap, sinks)
    first = (extent.q_lens.cumsum() - extent.q_lens).repeat(extent.q_lens)
    positions = torch.from_numpy(np.arange(tokens) - first + case.context).to(device)
    for one in (reference, kernel, kernel):  # a later plan takes another way than the first one
        set_out(one, extent, device)
    with reference.hiding(ends, there):
        right = reference.run(q.float(), keys.float(), values.float(), scores, positions)
    us = None
    with kernel.hiding(ends, there):
        got = {"eager": kernel.run(q, keys, values, scores, positions)}
        if device.type == "cuda":
            got["graph"], us = _captured(kernel, extent, (q, keys, values, scores, positions))
    worst = _worst(*((right, out.float()) for out in got.values()))
    return {**asdict(case), "difference": worst, "right": worst < bound, "us": us}


def _worst(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest difference; NaN where there is one, which Python's ``max`` may pass over."""
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _kept(case: Case) -> torch.dtype:
    return KEPT.get(case.kept, TYPES[case.dtype][0])


def _kernel(name: str, case: Case, buffers: AttentionBuffers, rows: int) -> TreeKernel:
    types = TYPES[case.dtype][0], _kept(case)
    heads = AttentionShape(case.q_heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, *types)
    device = buffers.mask.device
    if name == "triton":
        return own_kernel(heads, device)(buffers, rows, 0)
    workspace, integers = (
        torch.empty(n, dtype=torch.uint8, device=device) for n in (WORKSPACE_BYTES, INT_WORKSPACE_BYTES)
    )
    return FlashInferKernel(buffers, rows, heads, workspace, integers)


def _captured(
    kernel: TreeKernel, extent: Extent, arguments: tuple[Tensor, Tensor, Tensor, Scores, Tensor]
) -> tuple[Tensor, float]:
    """The output of a graph that is replayed after another plan, and microseconds of one replay."""
    recorded = Recorded(partial(kernel.run, *arguments))
    set_out(kernel, extent, recorded.output.device)
    return recorded.output, _us(recorded.replay)


def _us(run: Callable[[], Any]) -> float:
    """Microseconds of the device for one ``run``."""
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20 * 1e3


def check_layout(rows: int, context: int, width: int, device: torch.device) -> dict[str, Any]:
    """Slots and bits of the mask that differ from the host's; all are exact. Some requests have a gap, some
    tokens hide nothing, and there is padding."""
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.permutation(rows * context).reshape(rows, context).astype(np.int32))
    kv_lens, q_lens = rng.integers(width, context // 2, rows), rng.integers(1, 6, rows)
    gap = ContextGap(3, rng.integers(0, context // 2, rows) * (np.arange(rows) % 3 > 0))
    padded = Extent(np.zeros(rows + 2, np.int64), np.append(kv_lens, [1, 1]))
    lists = torch.from_numpy(slot_lists(padded, rng.permutation(rows), gap))
    extent, wrong = Extent(q_lens, kv_lens), 0
    right, got = (
        AttentionBuffers.allocate(int(kv_lens.sum()) + 2, int(extent.byte_starts[-1]), where)
        for where in (torch.device("cpu"), device)
    )
    list_slots(table, lists, right.kv_indices)
    list_fused(table.to(device), lists.to(device), got.kv_indices)
    wrong += int((right.kv_indices != got.kv_indices.cpu()).sum())
    ends = torch.from_numpy(np.where(np.arange(q_lens.sum()) % 5 == 3, -1, extent.window_ends))[None]
    seen = torch.from_numpy(rng.random((1, len(ends[0]), width)) < 0.5)
    words = got.mask.view(torch.int32)
    for shows in (False, True):
        change_tree_mask(right.mask, ends, seen, shows)
        change_fused(words, ends.to(device), seen.to(device), shows)
        wrong += int((right.mask != got.mask.cpu()).sum())
    return {"rows": rows, "context": context, "width": width, "wrong": wrong, "right": not wrong}


NOISE_BOUND = 2e-5
"""Noise reaches 22, where a unit in the last place of fp32 is 2e-6, and a log-probability is a difference of
two such numbers, each of which both sides have rounded a few times."""


def check_noise(rows: int, vocabulary: int, dtype: str, device: torch.device) -> dict[str, Any]:
    """The largest difference from torch's operators on the CPU, of all tokens and of the best ones'
    log-probabilities; every third row is greedy."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator).to(TYPES[dtype][0])
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=generator)
    spread = torch.full((rows,), 0.8)
    spread[::3] = 0
    columns = (torch.linspace(0.5, 2, rows), spread, keys, torch.arange(rows))
    there, scale, much, key, position = (c.to(device) for c in (logits, *columns))
    right, got = noise.transformed(logits, *columns), transform_fused(there, scale, much, key, position).cpu()
    pairs, logprobs = [(right, got)], right.log_softmax(dim=-1)
    for count in (NARROW, GPU_WIDTH):  # compiled for either
        best, at = (values.cpu() for values in best_fused(there, scale, much, key, position, None, count))
        found = right.topk(count, dim=-1).values - right.logsumexp(dim=-1, keepdim=True)
        pairs += [(found, best), (logprobs.gather(1, at), best)]
    words = torch.randperm(2 * vocabulary, generator=generator)[:vocabulary]  # of a draft that knows some
    found, _ = noise.best(logits, *columns, words, NARROW)
    best, _ = best_fused(there, scale, much, key, position, words.to(device), NARROW)
    worst = _worst(*pairs, (found, best.cpu()))
    return {"rows": rows, "vocabulary": vocabulary, "dtype": dtype, "difference": worst,
            "right": worst < NOISE_BOUND}  # fmt: skip


def check_moves(paths: int, deepest: int, sizes: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Paths of a window of three nodes per level, in buffers of 16-bit entries of ``sizes``, ten times over:
    what one thread overwrites before another has read it need not show the first time."""
    generator = torch.Generator().manual_seed(0)
    window = 1 + 3 * deepest
    slots = 1 + torch.randperm(paths * window, generator=generator).view(paths, window)
    drawn = torch.rand(paths, window - 1, generator=generator).argsort(1)[:, :deepest]
    pairs = torch.stack((slots[:, 1 : 1 + deepest], slots.gather(1, 1 + drawn.sort(1).values)), dim=-1)
    pairs[0, 0] = SCRATCH_SLOT  # of a path that is shorter
    target, source = pairs.to(device).unbind(-1)  # strided, as ``verify.moves`` gives them
    before = [torch.randn(1 + slots.numel(), size, generator=generator).half().to(device) for size in sizes]
    buffers, right = ([buffer.clone() for buffer in before] for _ in range(2))
    for buffer in right:
        buffer[target.flatten()] = buffer[source.flatten()].clone()
    mover, wrong = PathMover(buffers), 0
    for _ in range(10):
        for buffer, fresh in zip(buffers, before, strict=True):
            buffer.copy_(fresh)  # or a path that is moved again and again ends the same in any order
        mover.move(target, source)
        wrong += sum(int((a != b).sum()) for a, b in zip(buffers, right, strict=True))
    moved = int((target != source).sum())
    return {"paths": paths, "deepest": deepest, "buffers": len(sizes), "moved": moved, "wrong": wrong,
            "right": not wrong}  # fmt: skip


def check_beams(rows: int, depth: int, width: int, device: torch.device) -> dict[str, Any]:
    """Numbers of a search's levels that differ from what torch's operators give on the CPU; all are exact."""
    generator = torch.Generator().manual_seed(0)
    shape = tree_shape(depth, width, None)
    right, got = (Levels(shape, rows, torch.from_numpy(shape.columns).to(d)) for d in ("cpu", device))
    for step in range(1, depth + 1):
        # Every other level as Medusa's heads make it: all its nodes have the same children.
        logprob = -torch.rand(rows, width if step % 2 else 1, width, generator=generator)
        logprob = logprob.sort(dim=-1, descending=True).values.expand(-1, width, -1)
        token = torch.randint(0, 1 << 17, logprob.shape, generator=generator)
        there = logprob.to(device), token.to(device)
        if step == 1:
            right.start(logprob[:, 0], token[:, 0])
            got.start(*(values[:, 0] for values in there))
        else:
            right.grow(step, logprob, token)
            before, now, children = got.level(step - 1), got.level(step), got.children(step)
            grow_fused(got.found, got.visible, *there, before, now, children)
    pairs = (right.found, got.found), (right.visible, got.visible)
    wrong = sum(int((a != b.cpu()).sum()) for a, b in pairs)
    return {"rows": rows, "depth": depth, "width": width, "wrong": wrong, "right": not wrong}


def check_filters(rows: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Tokens that differ from what sorting keeps, and (on a GPU) microseconds of both, with one copy."""
    logits, settings = examples(rows, vocabulary, device)
    wrong = int(differences(filter_fused, logits, settings).sum())
    found: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "wrong": wrong, "right": not wrong}
    every, work = torch.arange(rows, device=device), logits.clone()

    def run(one: Filter) -> None:
        work.copy_(logits)  # what is filtered already takes less time
        one(work, every, *settings)

    for name, one in (("us", filter_fused), ("sort_us", by_sort)) if device.type == "cuda" else ():
        found[name] = _us(partial(run, one))
    return found


def run_one(name: str, device: str, every: bool = False) -> dict[str, Any]:
    """``every``: not only what the embedded pairs are served with."""
    start_s, where = time.perf_counter(), torch.device(device)
    compiled = {}
    if name == "flashinfer":
        seconds = compile_all(specs(hopper=torch.cuda.get_device_capability() == (9, 0), every=every))
        compiled = {"compile_s": round(seconds, 1)}
    if name == "noise":
        sizes = (192, 128_256) if device == "cuda" else (6, 1_300)
        results = [check_noise(*sizes, dtype, where) for dtype in TYPES]
    elif name in ("sglang", "writes"):
        run = sglang_kernels.operators if name == "sglang" else sglang_kernels.writes
        seconds, results = run(where)
        compiled = {"compile_s": round(seconds, 1)}
    elif name == "prefills":
        results = [sglang_kernels.prefill_graphs(where)]
    elif name == "filters":
        shapes = ((64, 128_256), (512, 151_936)) if device == "cuda" else ((8, 9_000),)
        results = [check_filters(*shape, where) for shape in shapes]
    elif name == "layout":
        cases = ((64, 4000, 17), (1, 16_000, 65)) if device == "cuda" else ((5, 90, 17),)
        results = [check_layout(*case, where) for case in cases]
        results += [check_follow(*case, where) for case in ((1, 3), (5, 2), (64, 2))]
        results += [check_unread(*case, where) for case in ((1, 5, 3), (9, 4, 2), (64, 3, 1))]
    elif name == "beams":
        results = [check_beams(*sizes, where) for sizes in ((1, 5, 3), (64, 5, 3), (24, 8, 8))]
        results += [check_search(*sizes, where) for sizes in ((1, 5, 3), (12, 4, 3), (2, 5, 8))]
    elif name == "moves":
        heads = ((1024,) * 64, (512,) * 16) if device == "cuda" else ((16, 8),)  # of Llama 3.1 8B, 3.2 1B
        results = [check_moves(64 if device == "cuda" else 3, 5, sizes, where) for sizes in heads]
        results += [check_accept(*case, where) for case in ((1, 15, 5), (64, 15, 5), (5, 90, 8), (3, 1, 1))]
    else:
        results = [check(name, case, where) for case in _cases(name, device, every)]
    right = all(r["right"] for r in results)
    seconds = round(time.perf_counter() - start_s, 1)
    return {"right": right, "seconds": seconds, **compiled, "cases": results}


def _cases(name: str, device: str, every: bool) -> tuple[Case, ...]:
    if device != "cuda":
        return SMALL
    return (*(EVERY if every else SERVED), *(OF_TRITON if name == "triton" else ()))


def run_all(device: str, limit_s: float, every: bool = False) -> dict[str, Any]:
    """Every kernel by name; {"right": False, "error": ...} for one that could not be run."""
    names = [name for name in KERNELS if device == "cuda" or name not in NEED_A_GPU]
    env = {**os.environ, **({} if device == "cuda" else {"TRITON_INTERPRET": "1"})}
    command = [sys.executable, "-m", "adaserve.bench.gpu_check.kernels", "--device", device]
    command += [*(["--every"] if every else []), "--kernel"]
    jobs = {
        name: subprocess.Popen([*command, name], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in names
    }
    end_s, results = time.monotonic() + limit_s, {}
    for name, job in jobs.items():
        try:
            out, errors = job.communicate(timeout=max(1.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_children(job.pid)  # compilers, which would take the cores from the servers that come
            job.kill()
            job.communicate()
            results[name] = {"right": False, "error": f"took longer than {limit_s:.0f} s"}
            continue
        try:  # a process that has said it may fail while it ends
            results[name] = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            lines = errors.decode(errors="replace").strip().splitlines()
            results[name] = {"right": False, "error": "\n".join(lines[-8:])}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernel", choices=KERNELS, help="this one, in this process")
    parser.add_argument("--every", action="store_true", help="also bf16, and heads of 128 dimensions")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    given = parser.parse_args()
    if given.kernel:
        print(json.dumps(run_one(given.kernel, given.device, given.every)))
        return 0
    results = run_all(given.device, given.limit, given.every)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, result in results.items():
        said = "right" if result["right"] else "; ".join(filter(None, ("NOT right", OPTIONAL.get(name))))
        print(f"{name}: {said} {result.get('error', '')}")
    # 0: all are right; 3: FlashInfer is not, 4: our own attention is not; 1: attention or another has none.
    right = {name: results[name]["right"] for name in ATTENTION if name in results}
    if not any(right.values()) or not all(results[name]["right"] for name in OTHERS):
        return 1
    return 0 if all(right.values()) else 3 if right["triton"] else 4


if __name__ == "__main__":
    raise SystemExit(main())

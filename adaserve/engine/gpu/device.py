"""The parts of an iteration on a GPU: padded forwards in CUDA graphs, and asynchronous copies.

On a CPU they run the same code on SDPA and without graphs, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from adaserve.checkpoints.draft_kind import HEADS
from adaserve.config import AdaServeConfig
from adaserve.engine.cuda_events import stream_of
from adaserve.engine.device import Drafter, Mark
from adaserve.engine.device_timing import mark
from adaserve.engine.gpu import noise
from adaserve.engine.gpu.attention import AttentionBuffers, MakeKernel
from adaserve.engine.gpu.draft_heads import GpuHead, gpu_head
from adaserve.engine.gpu.first_tokens import compile_sampler
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable, capture_all, least_free_bytes, least_of
from adaserve.engine.gpu.kernel_choice import kernel_maker
from adaserve.engine.gpu.medusa import GpuMedusa, gpu_medusa
from adaserve.engine.gpu.mixed import MixedForward
from adaserve.engine.gpu.model import Parts, SGLangCall, known_tokens
from adaserve.engine.gpu.prompts import (
    MAX_TOKENS,
    PromptForward,
    prompt_key,
    take_short_prompts,
)
from adaserve.engine.gpu.sizes import FIRST, READ_AT_ONCE, Key, SearchKey, Sizes, Tiers
from adaserve.engine.gpu.unread_candidates import write_nodes
from adaserve.engine.hidden_states import HiddenStates
from adaserve.engine.logits.filters import Filter, by_sort, checked
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.logits.portions import portions
from adaserve.engine.rotary_shift import RotaryShift
from adaserve.engine.transfer import QueuedCopy, put
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import UnreadNodes
from adaserve.patches.start.kv_sizing import MAX_CAPTURED_TOKENS

if TYPE_CHECKING:
    from adaserve.engine.gpu.move_kernel import PathMover  # needs Triton

logger = logging.getLogger(__name__)

MAX_CAPTURED_ROWS = 64
"""Largest padded size with a graph, as ``MAX_CAPTURED_TOKENS`` of verifications; larger batches run eagerly,
where launches no longer matter."""

MEASURED_KEYS = 1 << 20
"""Cached tokens of the largest forward that is measured at start (128 requests of 4 tokens at 4096)."""

MAX_BEAMS = 24
"""Of all requests in a draft step that is wider than ``NARROW``. With the costs of an H200, drafts of up to
eight beams pay for that many; the graphs of more would only take time and memory at the start."""

MIN_TOKENS = 512
"""Tokens that forwards have room for, at least."""


def listings_of_none(table: Tensor, most_rows: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of ``assign_req_to_token_pool_func`` for requests that take no slots, one of every kind that
    Triton compiles its kernel for. The types are those of ``eagle_prepare_for_decode``."""
    powers = range((most_rows - 1).bit_length() + 1)
    rows, lens, slots = (
        torch.zeros(count, dtype=kind, device=table.device)
        for count, kind in ((1 << powers[-1], torch.int64), (1 << powers[-1], torch.int32), (3, torch.int64))
    )
    for power, place in product(powers, range(2)):
        n = 1 << power
        yield rows[:n], table, lens[:n], lens[:n], slots[place:], n


def reads_prompts(runner: Any, forward: GpuForward) -> bool:
    """Whether our graphs may read a ``ModelRunner``'s prompts. They read keys as these are kept, while
    SGLang's kernels read those of a prompt before they are rounded to 8 bits: the text would be another."""
    return not isinstance(forward, GpuHead) and runner.token_to_kv_pool.dtype.itemsize > 1


def served_sizes(config: AdaServeConfig, most_rows: int) -> Sizes:
    """Those of a server that runs so many requests at a time."""
    policies = config.for_policies(most_beams=MAX_BEAMS)
    widest = {n: policies.widest(n) for n in range(1, most_rows + 1)}
    tokens = max(n * max(1 + config.candidates(w), FIRST * w) for n, w in widest.items())
    rows = Tiers.up_to(min(most_rows, MAX_CAPTURED_ROWS))
    return Sizes(
        rows=rows,
        # In smaller steps, since there tokens cost time: 64 more of them 0.7 to 1.4 ms on an H200.
        tokens=Tiers.up_to(min(tokens, MAX_CAPTURED_TOKENS), steps=4),
        most_rows=most_rows,
        most_tokens=max(MIN_TOKENS, tokens),
        depth=config.max_depth,
        # The fewest requests that are padded to a tier are one more than the tier before has.
        widths=tuple(widest[1 + below] for below in (0, *rows.sizes[:-1])),
        columns=1 + config.max_candidates,
    )


def largest_forward(sizes: Sizes, pool_rows: int, beside: int = 0) -> tuple[int, int]:
    """The most requests (padding included) and tokens of any forward. Searches pad rows to a tier, graphs of
    prompts have room for a fixed number of requests, and measurements at startup use all requests that have a
    row of the pool. ``beside``: tokens of prompts in a verification, at most."""
    rows = max(sizes.rows.fit(sizes.most_rows), pool_rows, prompt_key(MAX_TOKENS).rows - 1) + 1
    return rows, sizes.tokens.fit(sizes.most_tokens + beside)


class GpuDevice:
    """``Device`` on a GPU."""

    stops_early = False
    least_gain = 0.0
    most_beams = MAX_BEAMS

    def __init__(
        self,
        target: GpuForward,
        *drafts: GpuForward,
        medusa: GpuMedusa | None = None,
        self_drafter: GpuForward | None = None,
        attention: str = "sdpa",
        target_states: HiddenStates | None = None,
    ) -> None:
        self.target, self.drafts, self.medusa, self.self_drafter = target, drafts, medusa, self_drafter
        self.target_states, self.shift = target_states, target.parts.shift
        for draft in drafts:
            draft.most_tokens = min(draft.most_tokens, READ_AT_ONCE)
        self.device = target.device
        self.prompts: Sequence[PromptForward] = ()
        self.mixed: MixedForward | None = None
        self._attention = attention  # its kernel's name
        self._movers: dict[Any, PathMover] = {}
        self.filter: Filter = by_sort

    @classmethod
    def of(cls, target: Any, drafts: Sequence[Any], config: AdaServeConfig) -> GpuDevice:
        """For ``ModelRunner``s: static buffers of the sizes that will be served, and their graphs."""
        device = torch.device(target.device)
        table = target.req_to_token_pool.req_to_token
        most_rows, context = int(target.max_running_requests), int(table.shape[1])
        sizes = served_sizes(config, most_rows)
        longest = context + sizes.columns
        kv_entries = max((most_rows + 1) * longest, MEASURED_KEYS)
        # All tokens of the largest forward against the longest list there can be, every request on a byte.
        most_beside = MAX_TOKENS if config.prefill == "mixed" else 0
        mask_bytes = (sizes.most_tokens + most_beside) * longest // 8 + most_rows + 1
        largest = largest_forward(sizes, int(table.shape[0]), most_beside)
        attention, make = kernel_maker(config.attention, target, device, *largest)
        buffers = AttentionBuffers.allocate(kv_entries, mask_bytes, device)
        graphs = get_exec().graph
        capture = device.type == "cuda" and not graphs.disable_decode_cuda_graph

        shift = RotaryShift.of(target)

        def parts_of(runner: Any, make: MakeKernel, keys: Sequence[Key | SearchKey]) -> Parts:
            return Parts(
                SGLangCall(runner),
                make,
                GraphTable(capture),
                buffers,
                replace(sizes, captured=frozenset(keys)),
                table,
                candidates=config.most_children,
                last_position=int(target.model_config.context_len) - 1,
                last_token=int(runner.model_config.vocab_size) - 1,
                follows=attention != "flashinfer",
                words=known_tokens(runner.model, device),
                shift=shift if runner is target else RotaryShift.of(runner),
            )

        searches, of_drafts = list(sizes.searches()), list(sizes.drafts())
        verifications = list(sizes.verifications())
        forwards = []
        for draft in drafts:
            # One kernel for all.
            own = parts_of(draft, kernel_maker(attention, draft, device, *largest)[1], of_drafts)
            is_head = type(draft.model).__name__ in HEADS
            forwards.append(gpu_head(own, target, draft, config) if is_head else GpuForward(own))
        medusa = None
        if config.medusa is not None:
            medusa = gpu_medusa(parts_of(target, make, searches), target, Path(config.medusa))
        self_drafter = None
        if config.has_self:  # its searches begin with the roots, whose tokens the host knows
            self_drafter = GpuForward(replace(parts_of(target, make, searches), first=1, follows=False))
        readers = [f for f in (*forwards, medusa) if isinstance(f, GpuHead | GpuMedusa)]
        parts = cls(
            GpuForward(parts_of(target, make, verifications)),
            *forwards,
            medusa=medusa,
            self_drafter=self_drafter,
            attention=attention,
            target_states=readers[0].hidden if readers else None,
        )
        if device.type == "cuda":  # or the first requests would wait for compilers
            pools = [runner.token_to_kv_pool for runner in (target, *drafts)]
            parts.warm_moves([*pools, parts.target_states] if readers else pools)
            parts.warm_accept(table, config.deepest)
            parts.warm_unread()
            parts.warm_draws(int(target.model_config.vocab_size))
            compile_sampler(int(target.model_config.vocab_size), device)
            parts.warm_slots(table, most_rows)
        if (capture or device.type == "cpu") and not graphs.disable_prefill_cuda_graph:
            parts.read_prompts((target, *drafts), beside=most_beside > 0)
        if capture:
            parts.capture()
        logger.info("AdaServe: iterations on %s; %s", device, parts.summary())
        return parts

    def read_prompts(self, runners: Sequence[Any], beside: bool) -> None:
        """Graphs of ours read short prompts for the ``ModelRunner``s of the target and of the drafts; and
        ``beside`` what is verified."""
        models = zip(runners, (self.target, *self.drafts), strict=True)
        self.prompts = [take_short_prompts(m, f) for m, f in models if reads_prompts(m, f)]
        if beside and reads_prompts(runners[0], self.target):
            self.target.mixed = self.mixed = MixedForward(self.target)

    def capture(self) -> None:
        """All graphs, before the first request; those first that take the most memory and are missed the
        most."""
        free, sizes = partial(least_free_bytes, get_tp_group()), self.target.sizes
        of_drafts, searches = list(sizes.drafts()), list(sizes.searches())
        capture_all("verification", list(sizes.verifications()), self.target.capture, self.target.table, free)
        for draft in self.drafts:
            capture_all("draft", of_drafts, draft.capture, draft.table, free)
        for drafter in (self.medusa, self.self_drafter):
            if drafter is not None:
                capture_all("draft", searches, drafter.capture, drafter.table, free)
        for reader in self.prompts:
            capture_all("prompt", reader.keys, reader.capture, reader.table, free)
        if (mixed := self.mixed) is not None:
            capture_all("mixed", mixed.keys, mixed.capture, mixed.table, free)
        for draft in self.drafts:
            draft.compile_reading()

    @property
    def drafters(self) -> Sequence[GpuForward | GpuMedusa]:
        others = [drafter for drafter in (self.medusa, self.self_drafter) if drafter is not None]
        return (*self.drafts, *others)

    def is_busy(self) -> bool:
        return self.device.type == "cuda" and not stream_of(self.device).query()

    def mark(self) -> Mark:
        return mark(self.device)

    def put(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, Tensor]:
        return put(arrays, self.device)

    def get(self, **tensors: Tensor) -> QueuedCopy:
        return QueuedCopy(tensors)

    def draw(self, logits: Tensor, transform: LogitTransform) -> Tensor:
        names = ("scale", "spread", "keys", "positions")
        columns = self.put({name: getattr(transform, name) for name in names}).values()
        drawn = [
            noise.transformed(logits[part], *(column[part] for column in columns)).argmax(dim=-1)
            for part in portions(*logits.shape)
        ]
        return torch.cat(drawn)

    def accept(
        self, tensors: Mapping[str, Tensor], draws: Tensor, n: int, deepest: int, stride: int
    ) -> verify.Acceptance:
        """One kernel on a GPU, where there is anything to walk."""
        if not deepest or not draws.is_cuda:
            return verify.accept(tensors, draws, n, deepest, stride)
        from adaserve.engine.gpu.accept_kernel import accept_fused

        return accept_fused(tensors, draws, n, deepest, stride)

    def in_place(self, verified: verify.VerifyBatch, acceptance: verify.Acceptance) -> bool:
        """What was accepted is not known yet."""
        return verified.in_place

    def moves(
        self,
        tensors: Mapping[str, Tensor],
        acceptance: verify.Acceptance,
        table: Tensor,
        n: int,
        deepest: int,
    ) -> tuple[Tensor, Tensor]:
        """One kernel on a GPU."""
        if not table.is_cuda:
            return verify.moves(tensors, acceptance, table, n, deepest)
        from adaserve.engine.gpu.accept_kernel import moves_fused

        return moves_fused(tensors, acceptance, table, n, deepest)

    def move(self, pool: Any, target: Tensor, source: Tensor) -> None:
        """One kernel on a GPU."""
        if self.device.type != "cuda":
            return pool.move_kv_cache(target.flatten(), source.flatten())
        if pool not in self._movers:
            from adaserve.engine.gpu.move_kernel import PathMover

            is_states = isinstance(pool, HiddenStates)
            self._movers[pool] = PathMover([pool.by_slot] if is_states else [*pool.k_buffer, *pool.v_buffer])
        return self._movers[pool].move(target, source)

    def warm_moves(self, pools: Sequence[Any]) -> None:
        """Compiles the kernel that moves KV."""
        scratch = torch.full((1, 1), verify.SCRATCH_SLOT, dtype=torch.int64, device=self.device)
        for pool in pools:
            self.move(pool, scratch, scratch)

    def warm_accept(self, table: Tensor, deepest: int) -> None:
        """Compiles the kernels that accept tokens and say where they belong, for trees of every depth."""
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        for depth in range(1, deepest + 1):
            t = {"tree": none.expand(4 + depth, 1).contiguous(), "root": none, "places": none[None]}
            accepted = self.accept(t, none, 1, depth, deepest + 1)
            self.moves(t, accepted, table, 1, depth)

    def warm_unread(self) -> None:
        """Compiles the kernel that writes candidates which the host has not read."""
        none = torch.zeros(5, 2, dtype=torch.int64, device=self.device)
        names = {"tree": none, "row": none[0], "root": none[1, :1], "of": none[1, :1], "columns": none[2, :1]}
        found, seen = none.new_zeros(3, 1, 1), none.new_zeros(2, 8, dtype=torch.bool)
        write_nodes(UnreadNodes(found, names), none[3], seen, 0)

    def warm_draws(self, vocabulary: int) -> None:
        """Compiles the kernels of noise and filters for fp32 logits, which only requests that sample need."""
        from adaserve.engine.gpu.filter_kernel import filter_fused

        self.draw(torch.zeros(1, vocabulary, device=self.device), LogitTransform.plain(np.ones(1)))
        usable = checked(filter_fused, vocabulary, self.device)
        # Where one rank sorts all do: the two may differ where rounding decides.
        if least_of(get_tp_group(), int(usable is filter_fused)):
            self.filter = usable

    def warm_slots(self, table: Tensor, most_rows: int) -> None:
        """Compiles SGLang's kernel that lists new KV slots, which it calls before every iteration: for each
        power of two of requests, and for slots that start at a multiple of 16 bytes and elsewhere. On an H200
        everybody stood still for 0.1 s where a batch first had so many."""
        from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func

        for arguments in listings_of_none(table, most_rows):
            assign_req_to_token_pool_func(*arguments)

    def time(self, models: Sequence[Drafter], step: Callable[[], Any]) -> float:
        """The forwards of ``step`` alone, between events around their graphs: what the host prepares for each
        is not what a search or a verification costs."""
        for model in models:
            model.take_runs()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return sum(start.seconds_until(end) for model in models for start, end in model.take_runs())

    def report(self) -> dict[str, Any]:
        """Also what the graphs cost."""
        sizes = self.target.sizes
        return {
            "device": str(self.device),
            "attention": self._attention,
            "filters": "sort" if self.filter is by_sort else "triton",
            "captured": self.target.table.capture,
            "row_tiers": list(sizes.rows.sizes),
            "token_tiers": list(sizes.tokens.sizes),
            "draft_graphs": [drafter.table.report.to_json() for drafter in self.drafters],
            "verification_graphs": self.target.table.report.to_json(),
            "prompt_graphs": [reader.table.report.to_json() for reader in self.prompts],
            "mixed_graphs": None if self.mixed is None else self.mixed.table.report.to_json(),
        }

    def summary(self) -> str:
        """One line for the log."""
        if not self.target.table.capture:
            return "without CUDA graphs"
        mixed = () if self.mixed is None else (self.mixed,)
        total = [f.table.report for f in (*self.drafters, self.target, *self.prompts, *mixed)]
        return (
            f"{sum(r.graphs for r in total)} CUDA graphs in {sum(r.seconds for r in total):.1f} s, "
            f"{sum(r.bytes for r in total) / 1e6:.0f} MB"
        )

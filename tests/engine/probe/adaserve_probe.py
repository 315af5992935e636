"""SGLang plugin for tests: watches the AdaServe worker from inside the scheduler process.

It changes nothing about how tokens are verified. It counts, and every few iterations it audits both KV
caches: the tokens that the engine believes cached are run through the model afresh, into a scratch
pool, and the keys and values must equal those in the paged pool. A wrong compaction, a wrong draft
length or a wrong position shows here even when the sampled tokens happen to agree.

With ``rotate`` it hands each iteration to another real policy, and with ``hold_back`` it forbids trees
(max_depth 0) to changing requests, so that the draft has to catch up later. ``prefill_sizes`` lets one chunk
size after the other take the place of what the pacing rule says (0 = decode first), ``slow_ms`` stretches a
prefill by that much per token, ``decode_ms`` each decode iteration, and ``trace`` writes down every forward:
n > 0 is a prefill of n tokens, 0 a decode iteration. ``retract_every`` switches on SGLang's own test of
retraction: after that many forwards one running request is retracted, as if the KV pool were full, if there
are several. ``windows`` are what the draft may read of a context: each request gets another one in two of
three iterations, and of the draft's KV the first layer alone is audited, since what lies above depends on
what was read. ``fail_on`` names a request that cannot be accepted: an exception comes up while the scheduler
makes it. ``swap`` is a number of iterations, after which the weights of the next of the named drafts replace
the present ones. Of a head the hidden states that it reads are audited as well. ``compare_head`` has SGLang's
own class draft two steps for one text and writes down what it proposes, beside what our forward does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ENV = "ADASERVE_PROBE"


def register() -> None:
    if ENV not in os.environ:
        return
    from adaserve.engine import worker as module

    module.AdaServeWorker = probed(module.AdaServeWorker)  # type: ignore[misc]
    fail_on(json.loads(os.environ[ENV]).get("fail_on"))


def fail_on(rid: str | None) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._handle_generate_request

    def handle(self: Any, recv_req: Any, *rest: Any, **more: Any) -> None:
        if rid is not None and recv_req.rid == rid:
            raise RuntimeError("the probe was told to fail on this request")
        original(self, recv_req, *rest, **more)

    Scheduler._handle_generate_request = handle


def probed(base: type) -> type:
    options = json.loads(os.environ[ENV])

    class ProbedWorker(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.stats: dict[str, Any] = dict.fromkeys(
                (
                    "iterations",
                    "moved",
                    "accepted",
                    "drafted",
                    "rows",
                    "verify_tokens",
                    "audits",
                    "catch_ups",
                    "unread",
                    "early",
                    "ahead",
                    "taken_all",
                ),
                0,
            )
            self.stats.update(
                target_kv_error=0.0,
                draft_kv_error=0.0,
                hidden_error=0.0,
                hidden_audits=0,
                draft_audits=[0, 0],  # of the first draft model and the second
                forgotten=0,
                depths={},
                windows={},
                by_source={},  # accepted nodes by the bits of their sources
            )
            self.stats["wrong_lengths"] = []
            self.stats["lacking"] = -(1 << 30)  # KV slots of a draft that are not its request's
            self.stats["forwards"] = []
            self._reqs: dict[str, Any] = {}
            self._audits = 0
            if options.get("retract_every"):
                retract_every(options["retract_every"])

        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            decoded = self.loop.times.decoded

            def counted(outcome: Any, runs: Any) -> None:
                decoded(outcome, runs)
                self._count(outcome)

            self.loop.times.decoded = counted
            for name in ("_rows", "_advance", "_observe", "forget"):
                setattr(self.loop, name, partial(getattr(self, name), getattr(self.loop, name)))
            if options.get("rotate"):
                self._rotate()
            if options.get("compare_head"):
                self.stats["heads"] = both_heads(self)
                self._write()
            if options.get("prefill_sizes"):
                self._dictate(itertools.cycle(options["prefill_sizes"]))
            for draft in self.loop.device.drafts:
                draft.search = partial(self._search, draft.search)

        def _dictate(self, sizes: Any) -> None:
            plan = self.prefill.plan

            def dictated(*args: Any) -> Any:
                return dataclasses.replace(plan(*args), tokens=next(sizes))

            self.prefill.plan = dictated

        def _start_requests(self, batch: Any, first_tokens: list[int]) -> None:
            """Inside of what the worker times as a prefill."""
            time.sleep(options.get("slow_ms", 0.0) / 1e3 * batch.extend_num_tokens)
            super()._start_requests(batch, first_tokens)
            self._reqs.update((req.rid, (req, req.retraction_count)) for req in batch.reqs)
            self._trace(int(batch.extend_num_tokens))

        def _trace(self, tokens: int) -> None:
            if options.get("trace"):
                self.stats["forwards"].append(tokens)
                self._write()

        def _rotate(self) -> None:
            policies, choose = self.policies, self.policies.choose

            def rotated(name: str) -> None:
                choose(name)
                others = [policies.build(other) for other in options["rotate"]]
                policies.current = Rotation(policies.current, others, options.get("windows", ()))

            policies.choose = rotated
            rotated(self.config.policy)

        def _search(self, inner: Callable[..., Any], first: Any, search: Any, keep: Any) -> Any:
            """All that it may write to belongs to the request by then."""
            for row, cached in zip(search.pool_rows.tolist(), search.base.tolist(), strict=True):
                req = self._reqs[self.loop.requests.states[row].rid][0]
                lacking = cached + search.shape.width - req.kv.kv_allocated_len
                self.stats["lacking"] = max(self.stats["lacking"], lacking)
            return inner(first, search, keep)

        def _rows(self, inner: Callable[..., Any], *given: Any) -> Any:
            time.sleep(options.get("decode_ms", 0.0) / 1e3)  # inside of what is timed as an iteration
            rows = inner(*given)
            if options.get("swap"):
                self._swap(*options["swap"])
            if options.get("hold_back"):
                for r, state in enumerate(rows.states):
                    if (len(state.generated) // 7 + len(state.rid)) % 3 == 0:
                        rows.running.max_depth[r] = 0
            for source, _ in self._drafting():
                held = [source.cache[row] for row in rows.pool_rows.tolist()]
                self.stats["catch_ups"] += sum(bool(h.pending) for h in held)
            return rows

        def _drafting(self) -> list[tuple[Any, Any]]:
            """Every draft model's source and SGLang's worker of it."""
            models = () if self._draft_worker is None else self._draft_worker.models
            return [(self.loop.sources[k], model.worker) for k, model in enumerate(models)]

        def _swap(self, every: int, *folders: str) -> None:
            from safetensors.torch import load_file

            from adaserve.engine.worker import swap_of

            self.stats["looks"] = looks = self.stats.get("looks", 0) + 1
            if self.learner.tensors and not self.stats.get("poisoned"):
                self._poison()
            if looks % every == 0:
                folder = folders[looks // every % len(folders)]
                swap = swap_of(self._draft_worker.models[0].runner.model)
                swap.exchange(swap.prepared(load_file(f"{folder}/model.safetensors")))

        def _poison(self) -> None:
            """What a trainer that has gone mad would offer."""
            import torch

            from adaserve.sharpening import Correction
            from adaserve.trainer.draft import to_bytes
            from adaserve.trainer.messages import Candidate

            self.stats["poisoned"] = True
            learner = self.learner
            state = {}
            for name, (dtype, shape) in learner.tensors.items():
                kind = getattr(torch, dtype)
                state[name] = torch.full(
                    tuple(shape), float("nan") if kind.is_floating_point else 0, dtype=kind
                )
            data = to_bytes(state)
            learner.link.weights[: len(data)] = data
            learner.take_in(Candidate(0, len(data), 4.0, 1.0, Correction()))

        def _advance(self, inner: Callable[[], None]) -> None:
            iteration = self.loop._arriving
            inner()
            if iteration is None:
                return
            accepted, verified = iteration.accepted(), iteration.verified
            self.stats["moved"] += int((accepted & (verified.held_at[0] != verified.positions)).sum())
            self._audits += 1
            if self._audits % options.get("audit_every", 1 << 30) == 0:
                lengths = iteration.rows.seq_lens + [len(tokens) for tokens in iteration.emitted()]
                for r, state in enumerate(iteration.rows.states):
                    if self._holds_its_slots(state.rid, int(iteration.rows.pool_rows[r])):
                        self._audit(iteration.rows, r, int(lengths[r]))

        def _holds_its_slots(self, rid: str, pool_row: int) -> bool:
            """Under overlap a request may have ended or been retracted since the iteration, and the slots
            in its row may hold another prompt by now."""
            if rid not in self.loop.requests:
                return False
            req, retractions = self._reqs[rid]
            return bool(req.kv.req_pool_idx == pool_row and req.retraction_count == retractions)

        def _audit(self, rows: Any, r: int, length: int) -> None:
            state, pool_row = rows.states[r], int(rows.pool_rows[r])
            tokens = [*self._reqs[state.rid][0].origin_input_ids, *state.generated][:-1]
            stats = self.stats
            stats["audits"] += 1
            if len(tokens) != length:
                stats["wrong_lengths"].append([state.rid, len(tokens), length])
                return
            slots = self.req_to_token_pool.req_to_token[pool_row, :length].long()
            errors = kv_errors(self.target_worker, tokens, slots)
            stats["target_kv_error"] = max(stats["target_kv_error"], errors.max().item())
            layers = 1 if options.get("windows") else None
            if (states := self.loop.device.target_states) is not None:
                fresh = fresh_states(states, self.target_worker, tokens)
                stats["hidden_error"] = max(
                    stats["hidden_error"], (states.read(slots) - fresh).abs().max().item()
                )
                stats["hidden_audits"] += 1
            for k, (source, worker) in enumerate(self._drafting()):
                held = source.cache[pool_row]
                if held.length + len(held.pending) != length:
                    stats["wrong_lengths"].append([state.rid, k, length, held.length, len(held.pending)])
                    continue
                if states is not None:
                    known = head_errors(self.loop.device.drafts[k], fresh, tokens, slots)
                else:
                    known = kv_errors(worker, tokens, slots, layers)
                if len(known := known[: held.length]):
                    stats["draft_audits"][k] += 1
                    stats["draft_kv_error"] = max(stats["draft_kv_error"], known.max().item())

        def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
            self.stats["forgotten"] += 1
            super().note_request_finished(rid=rid, natural_stop=natural_stop)

        def ended_early(self, rid: str, holds_row: bool) -> None:
            super().ended_early(rid, holds_row)
            self.stats["unfinished"] = list(self.loop.requests._row)
            self._write()

        def _count(self, outcome: Any) -> None:
            stats = self.stats
            stats["iterations"] += 1
            stats["rows"] += len(outcome.new_tokens)
            stats["accepted"] += int(outcome.accepted.sum())
            if outcome.trees.source is not None:
                for bits in outcome.trees.source[outcome.accepted].tolist():
                    stats["by_source"][str(bits)] = stats["by_source"].get(str(bits), 0) + 1
            stats["drafted"] += outcome.trees.n_nodes
            stats["verify_tokens"] += outcome.selection.verify_tokens
            plan, context = outcome.plan, outcome.plan.running.context_tokens
            if plan.draft.window is not None:
                for window in plan.draft.window.tolist():
                    stats["windows"][str(window)] = stats["windows"].get(str(window), 0) + 1
            stats["unread"] += int((context - plan.draft.reads(context)).sum())
            if (underway := plan.running.underway) is not None:
                stats["early" if underway.depth else "ahead"] += 1
            stats["taken_all"] += plan.takes_all
            depth = str(plan.draft.depth)
            stats["depths"][depth] = stats["depths"].get(depth, 0) + 1
            self._trace(0)

        def _observe(self, inner: Callable[[], None]) -> None:
            known = self.loop._unobserved is None
            inner()
            if not known:
                self.stats["states"] = len(self.loop.requests.states)
                self.stats["policy_states"] = policy_size(self.policies.current)
                self._write()

        def forget(self, inner: Callable[[str], None], rid: str) -> None:
            inner(rid)
            self._reqs.pop(rid, None)
            if isinstance(self.policies.current, Rotation):
                self.policies.current.forget(rid)

        def _write(self) -> None:
            path = Path(options["out"])
            path.with_suffix(".new").write_text(json.dumps(self.stats))
            path.with_suffix(".new").replace(path)

    return ProbedWorker


def retract_every(forwards: int) -> None:
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = True
    scheduler.TEST_RETRACT_INTERVAL = forwards


def policy_size(policy: Any) -> int:
    """Entries of the largest container that a policy keeps."""
    sizes = [policy_size(p) for p in policy.policies] if isinstance(policy, Rotation) else [0]
    for value in vars(policy).values():
        if isinstance(value, dict):
            sizes.append(len(value))
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("adaserve.scheduler"):
            sizes.extend(len(v) for v in vars(value).values() if isinstance(v, dict))
    return max(sizes)


def kv_errors(worker: Any, tokens: list[int], slots: Any, layers: int | None = None) -> Any:
    """Largest difference of any key or value of each position from a fresh prefill, [positions]; of the
    first ``layers`` (None = all)."""
    import torch

    from adaserve.engine.cpu import Inputs
    from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE
    from adaserve.engine.trees.attention import causal_plan

    llama = getattr(worker.model_runner.model, LLAMA_ATTRIBUTE)
    pool = worker.model_runner.token_to_kv_pool
    n = len(tokens)
    every = torch.arange(n)
    scratch = [[torch.zeros(n, *b.shape[1:], dtype=b.dtype) for b in pool.k_buffer] for _ in range(2)]
    lengths = np.array([n])
    with recorded(llama):
        plan = causal_plan(every, lengths, lengths)
        llama.forward(Inputs(torch.tensor(tokens), every, every, plan), *scratch)
    return differences(scratch, pool, slots, layers)


def differences(scratch: Any, pool: Any, slots: Any, layers: int | None = None) -> Any:
    import torch

    errors = torch.zeros(len(slots))
    for fresh, paged in zip(scratch, (pool.k_buffer, pool.v_buffer), strict=True):
        for a, b in zip(fresh[:layers], paged[:layers], strict=True):
            errors = torch.maximum(errors, (a - b[slots]).abs().flatten(1).amax(1).float())
    return errors


@contextmanager
def recorded(llama: Any) -> Iterator[list[Any]]:
    """Forwards of a target inside give their hidden states to a list and to no head: what goes into the
    layers that a head reads, [T, layers, H], and what comes out of the final norm, [T, H]."""
    sink, states = llama.sink, []
    if sink is not None:
        llama.sink = SimpleNamespace(layers=sink.layers, write=lambda _, *given: states.append(given))
    yield states
    llama.sink = sink


def hidden_of(target_worker: Any, tokens: Any) -> Any:
    """fp32 [T, layers, H] and [T, H]: what heads may read of a text, in a fresh prefill."""
    import torch

    from adaserve.engine.cpu import Inputs
    from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE
    from adaserve.engine.trees.attention import causal_plan

    runner = target_worker.model_runner
    llama, buffers = getattr(runner.model, LLAMA_ATTRIBUTE), runner.token_to_kv_pool.k_buffer
    every, lengths = torch.arange(len(tokens)), np.array([len(tokens)])
    scratch = [[torch.zeros(len(tokens), *b.shape[1:], dtype=b.dtype) for b in buffers] for _ in range(2)]
    with recorded(llama) as states:
        plan = causal_plan(every, lengths, lengths)
        llama.forward(Inputs(torch.as_tensor(tokens), every, every, plan), *scratch)
    return states[0]


def fresh_states(states: Any, target_worker: Any, tokens: list[int]) -> Any:
    """What ``states`` should hold of a text, by a fresh prefill."""
    import torch

    layers, last = hidden_of(target_worker, tokens)
    with torch.no_grad():
        return last if states.project is None else states.project(layers)


def head_errors(head: Any, states: Any, tokens: list[int], slots: Any) -> Any:
    """The largest difference of each position's key or value in a head from a fresh prefill's, given the
    target's ``states``. The first token has none."""
    import torch

    from adaserve.engine.cpu.params import Before, Inputs
    from adaserve.engine.trees.attention import causal_plan

    pool, n = head.model.pool, len(tokens) - 1
    every, lengths = torch.arange(n), np.array([n])
    scratch = [[torch.zeros(n, *b.shape[1:], dtype=b.dtype) for b in pool.k_buffer] for _ in range(2)]
    text, plan = torch.tensor(tokens[1:]), causal_plan(every, lengths, lengths)
    head.model.model.forward(Inputs(text, every + 1, every, plan, Before(states[:-1])), *scratch)
    return torch.cat([torch.zeros(1), differences(scratch, pool, slots[1:])])


def both_heads(worker: Any, width: int = 3, length: int = 40) -> dict[str, Any]:
    """Tokens, parents' places and scores of the first two levels for one text: ours, and SGLang's own."""
    import torch

    tokens = torch.randint(2, 500, (length + 1,), generator=torch.Generator().manual_seed(4))
    slots = 1 + torch.randperm(2 * length + 60, generator=torch.Generator().manual_seed(5))
    table, mine = worker.req_to_token_pool.req_to_token, length + 1 + 2 * width
    table[1, :mine] = slots[:mine].int()
    found = {
        "ours": our_levels(worker, tokens, width),
        "sglang": sglang_levels(worker, tokens, slots[mine:], width),
    }
    table[1, :mine] = 0
    return found


def our_levels(worker: Any, tokens: Any, width: int) -> list[Any]:
    from adaserve.engine.device import Search
    from adaserve.engine.trees.batch import TreeBatch
    from adaserve.engine.trees.shape import tree_shape

    n, row, zero = len(tokens) - 1, np.array([1]), np.array([0])

    def text(count: int) -> Any:
        return TreeBatch.causal(tokens[:count].numpy(), row, zero, np.array([count]))

    device = worker.loop.device
    device.target.run(text(n))
    device.drafts[0].feed(text(n))
    ones, shape = np.ones(1, np.float32), tree_shape(2, width, None)
    search = Search(shape, np.array([n]), row, ones, 0 * ones, np.array([1], np.uint64))
    root = TreeBatch.roots(tokens[n:].numpy(), row, np.array([n]), shape.width)
    beams = device.drafts[0].search(root, search, None).read()
    parents = np.maximum(beams.parents[0, width:], 0)
    return [beams.tokens[0].tolist(), parents.tolist(), np.exp(beams.logprobs[0]).tolist()]


def sglang_levels(worker: Any, tokens: Any, slots: Any, width: int) -> list[Any]:
    """As ``EagleDraftWorker.draft_forward`` does it: its model, its runner, its choice of beams."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    from adaserve.engine.cpu import Inputs
    from adaserve.engine.cpu.sglang_forward import SGLangForward
    from adaserve.engine.trees.attention import TreeAttentionPlan, causal_plan

    runner, n = worker._draft_worker.models[0].runner, len(tokens) - 1
    ids = getattr(runner.model, "hot_token_id", None)

    def step(text: Any, positions: Any, at: Any, plan: Any, before: Any) -> tuple[Any, Any, Any]:
        forward = SGLangForward(runner)
        batch = forward._forward_batch(Inputs(text, positions, at, plan))
        batch.spec_info = SimpleNamespace(hidden_states=before)
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        output = forward._run(batch, plan)
        p, index = output.next_token_logits.softmax(-1).topk(width)
        return p, index if ids is None else ids[index], output.hidden_states

    length = np.array([n])
    layers, last = hidden_of(worker.target_worker, tokens[:n])
    raw = layers.flatten(1) if layers.numel() else last
    p, index, states = step(
        tokens[1:], torch.arange(n), slots[:n], causal_plan(slots[:n], length, length), raw
    )
    first, before, scores, _ = select_top_k_tokens(0, p[-1:], index[-1:], states[-1:], None, width)
    seen = torch.cat([torch.ones(width, n, dtype=torch.bool), torch.eye(width, dtype=torch.bool)], 1)
    spans = [torch.tensor([0, count], dtype=torch.int32) for count in (width, n + width)]
    plan = TreeAttentionPlan(*spans, slots[: n + width].int(), seen.flatten())
    p, index, states = step(first, torch.full((width,), n), slots[n : n + width], plan, before)
    with torch.compiler.set_stance("force_eager"):  # compiling it would take seconds
        second, _, both, (_, _, places) = select_top_k_tokens(1, p, index, states, scores, width)
    parents = (places[0] - width) // width
    return [[*first.tolist(), *second.tolist()], parents.tolist(), [*scores[0].tolist(), *both[0].tolist()]]


class Rotation:
    """Iteration i is planned, selected and observed by real policy number i modulo their count.

    Each row of two in three plans gets one of ``windows`` by chance, if there are any."""

    def __init__(self, first: Any, policies: list[Any], windows: Sequence[int] = ()) -> None:
        self.name = first.name
        self._windows, self._chance = windows, random.Random(1)
        self.policies = policies
        self._turn = 0
        self._planned: dict[int, Any] = {}  # by plan: under overlap the next one is planned before observing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policies[self._turn], name)

    def plan(self, running: Any, now_s: float) -> Any:
        self._turn = (self._turn + 1) % len(self.policies)
        policy = self.policies[self._turn]
        plan = policy.plan(running, now_s)
        if self._windows and self._chance.random() < 2 / 3:
            chosen = [self._chance.choice(self._windows) for _ in running.rids]
            sinks = self._chance.choice([0, 4, 5])
            draft = dataclasses.replace(plan.draft, window=np.array(chosen), sinks=sinks)
            plan = dataclasses.replace(plan, draft=draft)
        self._planned[id(plan)] = policy
        return plan

    def select(self, plan: Any, trees: Any) -> Any:
        return self._planned[id(plan)].select(plan, trees)

    def observe(self, outcome: Any) -> None:
        self._planned.pop(id(outcome.plan)).observe(outcome)

    def forget(self, rid: str) -> None:
        for policy in self.policies:
            policy.forget(rid)

"""The device worker's iterations on a tiny model: output is the target's own greedy text, token for token."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.device.agree import Agreement
from adaserve.engine.device.drafter import DeviceDrafter
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.device.worker import DeviceWorker
from adaserve.engine.state import RequestState
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.engine.worker import AdaServeWorker
from adaserve.scheduler.interface import IterationOutcome
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from tests.engine.device.factories import CPU, Requests, TinyModel, device_forward, read_plainly

LENGTHS = [5, 17, 1, 9]
TOKENS = 24
DEPTH, WIDTH = 4, 3


class Pool:
    """What the worker asks of SGLang's KV pools."""

    def __init__(self, model: TinyModel) -> None:
        self._buffers = model.k + model.v

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for buffer in self._buffers:
            buffer[target] = buffer[source].clone()


class TinyWorker(DeviceWorker):
    """The worker without SGLang around it: its iterations only, hence no parent's constructor."""

    def __init__(self, requests: Requests, target: TinyModel, draft: TinyModel, policy: str, overlap: bool):
        self.config = SimpleNamespace(max_depth=DEPTH, max_width=WIDTH, max_candidates=DEPTH * WIDTH)  # type: ignore[assignment]
        self.stride = DEPTH + 1
        self._states, self._in_flight, self._leaving, self._recorder = {}, None, [], None
        self._last_end_s, self._overlap = 0.0, overlap
        self._agreement = Agreement(SimpleNamespace(world_size=1, rank_in_group=0))  # type: ignore[arg-type]
        self.policy = build_policy(policy, policy_config())
        rows, tokens = Tiers((1, 2, 4, 8)), Tiers((1, 2, 4, 8, 16, 32, 64))
        models = SimpleNamespace(
            device=CPU, target=device_forward(target), draft=device_forward(draft), row_tiers=rows,
            token_tiers=tokens, most_rows=8, most_tokens=64, captures=False,
        )  # fmt: skip
        self._device_models = models  # type: ignore[assignment]
        self._device_drafter = DeviceDrafter(models.draft, read_plainly, DEPTH * WIDTH, rows, 64)
        self._history = requests.history.clone()
        self._target = self._draft = SimpleNamespace(busy_s=0.0)  # type: ignore[assignment]
        self._target_worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=Pool(target)))
        self._draft_worker = SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=Pool(draft)))  # type: ignore[assignment]
        self.req_to_token_pool = SimpleNamespace(req_to_token=requests.req_to_token)
        self.outcomes: list[IterationOutcome] = []

    @property
    def _settles_at_once(self) -> bool:
        return not self._overlap

    def _observe(self, outcome: IterationOutcome) -> None:
        self.outcomes.append(outcome)
        self.policy.observe(outcome)


def policy_config() -> PolicyConfig:
    return PolicyConfig(latency=default_latency(), budget=24, d_max=DEPTH, w_max=WIDTH)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the model says, computed from scratch for every token."""
    model, tokens = TinyModel(300), list(prompt)
    for _ in range(count):
        at, ends = torch.arange(len(tokens)), torch.tensor([0, len(tokens)], dtype=torch.int32)
        plan = TreeAttentionPlan(ends, ends, (at + 1).int())
        tokens.append(int(model.argmax(model.hidden(torch.tensor(tokens), at, at + 1, plan))[-1]))
    return tokens[len(prompt) :]


def noisy(model: TinyModel) -> TinyModel:
    """A draft that agrees often, not always."""
    generator = torch.Generator().manual_seed(2)
    embed = model.backend._embed
    model.backend._embed = embed + 0.02 * torch.randn(embed.shape, generator=generator)
    return model


class Run:
    """Some requests from their first token to the end."""

    def __init__(self, policy: str, overlap: bool, copied: bool = False, draft_knows_prompts: bool = True):
        self.requests = requests = Requests(LENGTHS, 1)
        self.target = TinyModel(requests.slots)
        self.draft = TinyModel(requests.slots) if copied else noisy(TinyModel(requests.slots))
        requests.prefill(self.target)
        if draft_knows_prompts:
            requests.prefill(self.draft)
        self.worker = TinyWorker(requests, self.target, self.draft, policy, overlap)
        history = [
            requests.history[row, :length] for row, length in zip(requests.pool_rows, LENGTHS, strict=True)
        ]
        self.expected = [greedy(h.tolist(), TOKENS) for h in history]
        self.got = [e[:1] for e in self.expected]
        self.reqs = [self._request(r, draft_knows_prompts) for r in range(len(LENGTHS))]
        self.lens, self.roots = torch.tensor(LENGTHS), torch.tensor([e[0] for e in self.expected])
        self.iterations = 0

    def _request(self, r: int, known: bool) -> Any:
        row = int(self.requests.pool_rows[r])
        params = SimpleNamespace(
            max_new_tokens=TOKENS, top_k=1, temperature=1.0, frequency_penalty=0.0, presence_penalty=0.0,
            repetition_penalty=1.0, min_new_tokens=0,
        )  # fmt: skip
        state = RequestState(f"r{r}", "default", 0.02, time.perf_counter(), generated=self.expected[r][:1])
        state.draft_len = LENGTHS[r] if known else 0
        self.worker._states[row] = state
        return SimpleNamespace(
            rid=f"r{r}", req_pool_idx=row, sampling_params=params, grammar=None, custom_logit_processor=None,
            to_finish=None,
        )  # fmt: skip

    def step(self) -> Any:
        info = SimpleNamespace(
            is_all_greedy=True, logit_bias=None, grammars=None, has_custom_logit_processor=False
        )
        rows = self.requests.pool_rows
        batch = SimpleNamespace(
            reqs=self.reqs, seq_lens=self.lens, seq_lens_cpu=self.lens.clone(), sampling_info=info,
            req_pool_indices=rows, req_pool_indices_cpu=rows, return_logprob=False, has_grammar=False,
            spec_info=SimpleNamespace(bonus_tokens=self.roots),
        )  # fmt: skip
        result = self.worker._decode(batch, None)
        ids = result.next_token_ids.view(len(LENGTHS), -1)
        for r, count in enumerate(result.accept_lens.tolist()):
            self.got[r] += ids[r, :count].tolist()
        self.lens, self.roots = result.new_seq_lens, result.next_draft_input.bonus_tokens
        self.iterations += 1
        return result

    def finish(self) -> Run:
        while min(map(len, self.got)) < TOKENS:
            self.step()
        self.worker._settle()
        return self

    def check(self) -> None:
        for r, req in enumerate(self.reqs):
            assert self.got[r][:TOKENS] == self.expected[r], f"request {r}"
            state = self.worker._states[req.req_pool_idx]
            assert state.generated == self.got[r] and state.decoded == len(self.got[r]) - 1
        for outcome in self.worker.outcomes:
            assert (outcome.accepted <= outcome.selection.keep).all()
            per_row = np.add.reduceat(np.append(outcome.accepted, 0), outcome.trees.row_start[:-1])
            filled = np.diff(outcome.trees.row_start) > 0
            assert (outcome.new_tokens - 1 == np.where(filled, per_row, 0)).all()
            assert outcome.selection.counts.sum() == outcome.selection.keep.sum()
            assert outcome.total_s >= outcome.verify_s > 0 and outcome.since_last_s >= 0
        spent = sum(o.total_s for o in self.worker.outcomes)
        assert 0 < self.worker._target.busy_s < spent, "models were timed with what is around them"


POLICIES = ["adaserve", "priced", "chain-3", "equal-greedy", "fixed-tree", "none", "turbospec"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy(policy: str, overlap: bool) -> None:
    run = Run(policy, overlap).finish()
    run.check()
    assert len(run.worker.outcomes) == run.iterations
    accepted = sum(int(o.accepted.sum()) for o in run.worker.outcomes)
    if policy not in ("none", "turbospec", "priced"):  # what these draft depends on measured times
        assert accepted > 10, "the draft agrees too rarely to test anything"


def test_depth_is_planned_without_a_frontier() -> None:
    """``priced`` may not count on being stopped between draft steps: here nobody asks it."""
    worker = Run("priced", overlap=True).worker
    worker.latency, worker.config.budget = default_latency(), None  # type: ignore[misc]
    built, inherited = worker.build_policy("priced"), AdaServeWorker.build_policy(worker, "priced")
    assert not built.config.early_stop and inherited.config.early_stop  # type: ignore[attr-defined]


def test_a_copy_of_the_target_is_accepted_whole() -> None:
    run = Run("chain-3", overlap=True, copied=True).finish()
    run.check()
    assert run.iterations == -(-(TOKENS - 1) // 4)


def test_the_outcome_arrives_one_iteration_late_under_overlap() -> None:
    late, prompt = Run("adaserve", overlap=True), Run("adaserve", overlap=False)
    for run, seen in ((late, 0), (prompt, 1)):
        run.step()
        assert len(run.worker.outcomes) == seen
    late.step()
    assert len(late.worker.outcomes) == 1


@pytest.mark.parametrize("first", ["none", "adaserve"])
def test_policies_change_while_requests_run(first: str) -> None:
    """A policy that drafts takes over from one that does not: the draft reads up on what it missed."""
    run = Run(first, overlap=True, copied=True, draft_knows_prompts=first != "none")
    names = itertools.cycle([first, first, "chain-3", "none", "priced"])
    built = {n: build_policy(n, policy_config()) for n in ("none", "adaserve", "chain-3", "priced")}
    while min(map(len, run.got)) < TOKENS:
        run.worker.policy = built[next(names)]
        run.step()
    run.worker._settle()
    run.check()
    chains = [o for o in run.worker.outcomes if o.plan.depth == 3 and o.plan.width == 1]
    assert chains and all(o.accepted.sum() == o.selection.keep.sum() for o in chains), (
        "the draft missed something"
    )


def test_the_draft_cache_holds_what_it_should() -> None:
    """After all those moves, a fresh prefill of the same tokens gives the same keys and values."""
    run = Run("adaserve", overlap=True).finish()
    fresh = noisy(TinyModel(run.requests.slots))
    for r, req in enumerate(run.reqs):
        # The newest cached token may be unknown to the draft: its first step feeds that one again.
        length = run.worker._states[req.req_pool_idx].draft_len
        prompt = run.requests.history[run.requests.pool_rows[r], : LENGTHS[r]].tolist()
        tokens = torch.tensor([*prompt, *run.got[r]])[:length]
        slots = run.requests.req_to_token[req.req_pool_idx, :length]
        ends = torch.tensor([0, length], dtype=torch.int32)
        fresh.hidden(tokens, torch.arange(length), slots.long(), TreeAttentionPlan(ends, ends, slots))
        for a, b in zip(fresh.k + fresh.v, run.draft.k + run.draft.v, strict=True):
            torch.testing.assert_close(a[slots.long()], b[slots.long()], rtol=1e-3, atol=1e-4)
        assert run.worker._history[req.req_pool_idx, :length].tolist() == tokens.tolist()


def test_a_finished_request_is_forgotten_after_its_last_iteration() -> None:
    run = Run("priced", overlap=True)
    run.step()
    run.worker.note_request_finished(rid="r0", natural_stop=True)
    forgotten: list[str] = []
    run.worker.policy.forget = forgotten.append  # type: ignore[method-assign]
    assert run.worker._leaving == ["r0"]
    run.step()
    assert forgotten == ["r0"] and not run.worker._leaving

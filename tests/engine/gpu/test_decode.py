"""Decode iterations on a tiny model, over a host's parts and over a device's: what comes out is the
target's own greedy text, token for token."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.config import AdaServeConfig
from adaserve.engine.cpu import Inputs
from adaserve.engine.decisions import Decisions
from adaserve.engine.decode import DecodeLoop
from adaserve.engine.device_timing import HostMark
from adaserve.engine.kv_compaction import KVCompactor
from adaserve.engine.learning.tap import Tap
from adaserve.engine.policies import ServedPolicies
from adaserve.engine.rank_sync import RankSync
from adaserve.engine.request_state import BatchRequests, RequestState
from adaserve.engine.requests import Requests as ServedRequests
from adaserve.engine.roots import RootTokens
from adaserve.engine.sampling import Settings
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.self_draft import SHARPENING
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.sources.suffix import SUFFIX, SuffixSource
from adaserve.engine.transfer import QueuedCopy
from adaserve.engine.trees.attention import TreeAttentionPlan
from adaserve.scheduler.costs.latency import default_latency
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import MODEL, SECOND_MODEL, IterationOutcome
from adaserve.scheduler.iteration_recording import Recorder, read_recording, replay
from adaserve.scheduler.policies import PolicyConfig, build_policy
from adaserve.slo.lengths import OutputLengths
from tests.engine.gpu.factories import Pool, Requests, TinyModel, graph_device, host_device

LENGTHS = [5, 17, 1, 9]
TOKENS = 24
DEPTH, WIDTH = 4, 3
DEVICES = {"host": host_device, "graphs": graph_device}
SUFFIX_DEPTH = 7
NOISE = (2, 5)  # seeds of the draft models
CONFIG = AdaServeConfig(policy="none", budget=24, max_depth=DEPTH, max_width=WIDTH)


def policy_config(drafts: int = 1) -> PolicyConfig:
    return replace(CONFIG.for_policies(latency=default_latency()), drafts=drafts)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the model says, computed from scratch for every token."""
    model, tokens = TinyModel(300), list(prompt)
    for _ in range(count):
        at, ends = torch.arange(len(tokens)), torch.tensor([0, len(tokens)], dtype=torch.int32)
        plan = TreeAttentionPlan(ends, ends, (at + 1).int())
        states = model.hidden(Inputs(torch.tensor(tokens), at, at + 1, plan))
        tokens.append(int(model.argmax(states)[-1]))
    return tokens[len(prompt) :]


def noisy(model: TinyModel, seed: int) -> TinyModel:
    """A draft that agrees often, not always."""
    generator = torch.Generator().manual_seed(seed)
    embed = model.backend._embed
    model.backend._embed = embed + 0.02 * torch.randn(embed.shape, generator=generator)
    return model


class Run:
    """Some requests from their first token to the end. ``copied``: the last draft model is the target."""

    def __init__(
        self,
        policy: str,
        overlap: bool,
        device: str = "graphs",
        copied: bool = False,
        draft_knows_prompts: bool = True,
        drafts: str = "model",
    ) -> None:
        self.requests = requests = Requests(LENGTHS, 1)
        self.target = TinyModel(requests.slots)
        seeds = NOISE[: 0 if drafts == "self" else 2 if "second" in drafts else 1]
        self.models = [noisy(TinyModel(requests.slots), seed) for seed in seeds]
        if copied:
            self.models[-1] = TinyModel(requests.slots)
        requests.prefill(self.target)
        if draft_knows_prompts:
            for model in self.models:
                requests.prefill(model)
        parts = DEVICES[device](  # type: ignore[operator]
            requests, self.target, *self.models, drafts_itself=drafts == "self"
        )
        lag = [0] * len(LENGTHS) if draft_knows_prompts else LENGTHS
        self.beams = [
            requests.source(parts, lag, max_nodes=DEPTH * WIDTH, number=k) for k in range(len(self.models))
        ]
        self.policies = ServedPolicies(CONFIG, LearnedCosts(default_latency()), parts)
        self.policies.current = build_policy(policy, policy_config(len(parts.drafters)))
        self.outcomes: list[IterationOutcome] = []
        alone = SimpleNamespace(world_size=1, rank_in_group=0)
        self.loop = DecodeLoop(
            device=parts,
            sources=self.beams or [StatelessSource(parts.self_drafter, SHARPENING, DEPTH * WIDTH, DEPTH)],
            compactor=KVCompactor(
                parts, [Pool(model) for model in (self.target, *self.models)], requests.req_to_token
            ),
            requests=ServedRequests((1, 0)),
            decisions=Decisions(self.policies, RankSync(alone), None),  # type: ignore[arg-type]
            tap=Tap(0.0),
            learner=None,
            lengths=OutputLengths(),
            observed=self.outcomes.append,
            deepest=SUFFIX_DEPTH,
            overlaps=overlap,
        )
        self.expected = [greedy(requests.text(r), TOKENS) for r in range(len(LENGTHS))]
        self.got = [e[:1] for e in self.expected]
        self.reqs = [self._request(r) for r in range(len(LENGTHS))]
        self.lens, self.iterations = torch.tensor(LENGTHS), 0
        self.verified: list[list[int]] = []  # tokens of each request, by iteration
        if "suffix" in drafts:
            self._retrieve("model" in drafts)

    @property
    def draft(self) -> TinyModel:
        return self.models[0]

    @property
    def source(self) -> BeamSource:
        return self.beams[0]

    def _retrieve(self, drafts_too: bool) -> None:
        """Earlier requests of the same key were served the same texts, except for a token here and there."""
        suffix = SuffixSource(SUFFIX_DEPTH, SUFFIX_DEPTH + 3, 1_000_000, lambda req: "key")
        n = len(LENGTHS)
        for first, damage in ((n, 9), (0, 0)):
            reqs = []
            for r, expected in enumerate(self.expected):
                text = self.requests.text(r)
                if damage:
                    text = [t + (i % damage == 8) for i, t in enumerate([*text, *expected])]
                reqs.append(
                    SimpleNamespace(rid=f"r{first + r}", origin_input_ids=text, multimodal_inputs=None)
                )
            rows = torch.from_numpy(self.requests.pool_rows) + first
            lens = [len(r.origin_input_ids) for r in reqs]
            read = SimpleNamespace(
                reqs=reqs, req_pool_indices_cpu=rows, prefix_lens=[0] * n, extend_lens=lens
            )
            suffix.prefilled(read, True)
        for row in range(n + 1, 2 * n + 1):
            suffix.finished(row, False)
        self.loop.sources = (*self.beams, suffix) if drafts_too else (suffix,)

    def _request(self, r: int) -> Any:
        row = int(self.requests.pool_rows[r])
        params = SimpleNamespace(
            max_new_tokens=TOKENS, top_k=1, temperature=1.0, frequency_penalty=0.0, presence_penalty=0.0,
            repetition_penalty=1.0, min_new_tokens=0, top_p=1.0, min_p=0.0,
        )  # fmt: skip
        state = RequestState(
            f"r{r}", "default", 0.02, time.perf_counter(), generated=self.expected[r][:1],
            prompt_tokens=LENGTHS[r],
        )  # fmt: skip
        self.loop.requests.states[row] = state
        return SimpleNamespace(
            rid=f"r{r}", req_pool_idx=row, sampling_params=params, grammar=None, custom_logit_processor=None,
            to_finish=None,
        )  # fmt: skip

    def batch(self) -> Any:
        """What SGLang's scheduler hands over."""
        info = SimpleNamespace(
            is_all_greedy=True, logit_bias=None, has_custom_logit_processor=False,
            sampling_seed=None,
        )  # fmt: skip
        rows = torch.from_numpy(self.requests.pool_rows)
        return SimpleNamespace(
            reqs=self.reqs, seq_lens=self.lens, sampling_info=info,
            req_pool_indices=rows, req_pool_indices_cpu=rows, return_logprob=False,
            spec_info=RootTokens(torch.tensor([got[-1] for got in self.got])),
        )  # fmt: skip

    def step(self) -> Any:
        result = self.loop.decode(self.batch(), None)
        ids = result.next_token_ids.view(len(LENGTHS), -1)
        for r, count in enumerate(result.accept_lens.tolist()):
            self.got[r] += ids[r, :count].tolist()
        roots = [got[-1] for got in self.got]
        assert result.next_draft_input.bonus_tokens.tolist() == roots
        self.lens, self.iterations = result.new_seq_lens, self.iterations + 1
        self.verified.append(result.cap_lens.tolist())
        return result

    def finish(self) -> Run:
        while min(map(len, self.got)) < TOKENS:
            self.step()
        self.loop.settle()
        return self

    def check(self) -> None:
        for r, req in enumerate(self.reqs):
            assert self.got[r][:TOKENS] == self.expected[r], f"request {r}"
            state = self.loop.requests.states[req.req_pool_idx]
            assert state.generated == self.got[r] and state.decoded == len(self.got[r]) - 1
        for outcome in self.outcomes:
            assert (outcome.accepted <= outcome.selection.keep).all()
            per_row = np.add.reduceat(np.append(outcome.accepted, 0), outcome.trees.row_start[:-1])
            filled = np.diff(outcome.trees.row_start) > 0
            assert (outcome.new_tokens - 1 == np.where(filled, per_row, 0)).all()
            assert outcome.selection.counts.sum() == outcome.selection.keep.sum()
            assert outcome.total_s >= outcome.verify_s > 0 and outcome.since_last_s >= 0
        spent, target_s = sum(o.total_s for o in self.outcomes), self.loop.times.report()["target_s"]
        assert 0 < target_s < spent, "models were timed with what is around them"
        verified_s = sum(o.verify_s for o in self.outcomes)
        assert target_s <= verified_s + 1e-9, "a forward began before its verification"


POLICIES = ["adaserve", "priced", "chain-3", "equal-greedy", "fixed-tree", "none", "turbospec"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy(policy: str, overlap: bool, device: str) -> None:
    run = Run(policy, overlap, device).finish()
    run.check()
    assert len(run.outcomes) == run.iterations
    assert run.verified == [(o.selection.counts + 1).tolist() for o in run.outcomes]
    accepted = sum(int(o.accepted.sum()) for o in run.outcomes)
    if policy not in ("none", "turbospec", "priced"):  # what these draft depends on measured times
        assert accepted > 10, "the draft agrees too rarely to test anything"


@pytest.mark.parametrize("device", [*DEVICES, "captured graphs"])
def test_sglang_is_told_whether_a_verification_was_a_graph(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Captured:
        """Stands for a graph, on a host that has none."""

        def __init__(self, function: Any) -> None:
            self.replay = function

    monkeypatch.setattr("adaserve.engine.gpu.graphs.CapturedGraph", Captured)
    run = Run("chain-3", overlap=True, device=device.removeprefix("captured "))
    if captures := device == "captured graphs":
        run.loop.device.target.table.capture = True  # type: ignore[attr-defined]
    assert [run.step().can_run_cuda_graph for _ in range(3)] == [captures] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_what_free_slots_hold_does_not_matter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another request's numbers overflowed. Windows reach over slots that nobody has written."""

    class Dirty(TinyModel):
        def __init__(self, slots: int, seed: int = 0) -> None:
            super().__init__(slots, seed)
            for buffer in (*self.k, *self.v):
                buffer[1:] = torch.nan

    monkeypatch.setattr(sys.modules[__name__], "TinyModel", Dirty)
    run = Run("adaserve", overlap=True, device=device).finish()
    run.check()
    assert sum(int(o.accepted.sum()) for o in run.outcomes) > 10


@pytest.mark.parametrize("policy", ["priced", "turbospec", "none"])
def test_a_recording_under_overlap_replays(policy: str, tmp_path: Path) -> None:
    """Between plan and selection the last outcome is observed, where nothing is queued ahead of it."""
    run, path = Run(policy, overlap=True), tmp_path / "run.jsonl"
    with Recorder(path) as run.loop.decisions.recorder:
        run.finish()
    assert len(list(read_recording(path))) == run.iterations
    assert replay(path, build_policy(policy, policy_config())) == []


def test_what_prefills_ran_is_no_part_of_an_iteration() -> None:
    """A draft fills holes in them."""
    run, start, end = Run("none", overlap=False), HostMark(), HostMark()
    end.time_s += 100
    run.loop.device.drafts[0]._runs.append((start, end))  # type: ignore[attr-defined]
    run.step()
    assert run.loop.times.report()["draft_s"] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", ["model,suffix", "suffix"])
@pytest.mark.parametrize("policy", ["adaserve", "priced", "chain-3", "fixed-tree", "equal-greedy"])
def test_greedy_with_earlier_text(policy: str, drafts: str, overlap: bool, device: str) -> None:
    run = Run(policy, overlap, device, drafts=drafts).finish()
    run.check()
    by_source = accepted_by_source(run)
    assert by_source[SUFFIX] > 10, "earlier text was not used"
    if policy != "priced":
        assert (by_source[SUFFIX | MODEL] > 0) == ("model" in drafts), "sources never agreed"
    if "model" in drafts:
        check_draft_cache(run)


def accepted_by_source(run: Run) -> Counter[int]:
    """Accepted nodes by the bits of those that proposed them."""
    by_source: Counter[int] = Counter()
    for outcome in run.outcomes:
        trees = outcome.trees
        source = np.full(trees.n_nodes, MODEL) if trees.source is None else trees.source
        by_source.update(source[outcome.accepted].tolist())
    return by_source


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", ["model,second", "model,second,suffix"])
@pytest.mark.parametrize("policy", ["adaserve", "priced", "fixed-tree"])
def test_greedy_with_two_draft_models(policy: str, drafts: str, overlap: bool, device: str) -> None:
    run = Run(policy, overlap, device, drafts=drafts).finish()
    run.check()
    if policy != "priced":  # what it drafts depends on measured times
        by_source = accepted_by_source(run)
        assert by_source[MODEL | SECOND_MODEL] or by_source[MODEL | SECOND_MODEL | SUFFIX], (
            "they never agreed"
        )
        if drafts == "model,second":
            assert by_source[MODEL] and by_source[SECOND_MODEL], "one of them was of no use"
    check_draft_cache(run)


@pytest.mark.parametrize("device", DEVICES)
def test_each_draft_model_keeps_what_it_made(device: str) -> None:
    """The second model is right throughout. In the merged tree the first one's nodes come first, but the
    second one lacks no more than its last token, as if it were alone."""
    run = Run("chain-2", overlap=False, device=device, drafts="model,second", copied=True)
    for _ in range(5):
        run.step()
        assert (run.outcomes[-1].new_tokens == 3).all()
        assert [len(run.beams[1].cache[req.req_pool_idx].pending) for req in run.reqs] == [1] * len(LENGTHS)
    assert any(len(run.beams[0].cache[req.req_pool_idx].pending) > 1 for req in run.reqs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["adaserve", "priced", "fixed-tree"])
def test_greedy_where_the_target_drafts_for_itself(policy: str, overlap: bool, device: str) -> None:
    """With little of its own KV cache, which its draft steps write to."""
    run = Run(policy, overlap, device, drafts="self")
    run.policies.current = build_policy(policy, replace(policy_config(), draft_windows=(16,)))
    run.finish().check()
    check_target_cache(run)
    plans = [outcome.plan for outcome in run.outcomes if outcome.plan.draft.depth]
    contexts = [plan.running.context_tokens for plan in plans]
    assert any((p.draft.reads(c) < c).any() for p, c in zip(plans, contexts, strict=True))
    if policy != "priced":  # what it drafts depends on measured times
        assert accepted_by_source(run)[MODEL] > len(LENGTHS), "it hardly ever agreed with itself"


def test_depth_is_planned_without_a_frontier_where_nobody_asks() -> None:
    """``priced`` may not count on being stopped between draft steps of a device."""
    for device, asks in (("host", True), ("graphs", False)):
        policies = Run("none", overlap=True, device=device).policies
        assert policies.get("priced").config.early_stop is asks  # type: ignore[attr-defined]
        assert policies.get("priced") is policies.get("priced")


@pytest.mark.parametrize("name", ["none", "none@64"])
def test_plain_decoding_takes_no_offers(name: str) -> None:
    run = Run("priced", overlap=True, device="host", drafts="suffix")
    device = run.loop.device
    run.loop.decisions.policies = ServedPolicies(
        AdaServeConfig(), LearnedCosts(default_latency()), device, True
    )
    run.loop.decisions.policies.choose(name)
    run.finish().check()
    assert not any(outcome.trees.n_nodes for outcome in run.outcomes)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_of_the_target_is_accepted_whole(device: str) -> None:
    run = Run("chain-3", overlap=True, device=device, copied=True).finish()
    run.check()
    assert run.iterations == -(-(TOKENS - 1) // 4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_outcome_is_observed_one_iteration_late_under_overlap(device: str) -> None:
    late, prompt = (Run("adaserve", overlap=o, device=device) for o in (True, False))
    for run, seen in ((late, 0), (prompt, 1)):
        run.step()
        assert len(run.outcomes) == seen
    late.step()
    assert len(late.outcomes) == 1


def test_under_overlap_the_policy_learns_while_the_next_draft_is_on_its_way() -> None:
    """The states advance before planning; the policy is told after the draft was queued."""
    run, events = Run("adaserve", overlap=True), []

    def told(name: str, inner: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return inner(*args)

        return call

    policy, source = run.policies.current, run.source
    watched = {policy: ("plan", "observe", "select"), source: ("propose", "advanced")}
    for owner, names in watched.items():
        for name in names:
            setattr(owner, name, told(name, getattr(owner, name)))
    run.step()
    run.step()
    assert events == ["plan", "propose", "select", "advanced", "plan", "propose", "observe", "select"]


def test_what_requests_ask_for_is_read_while_the_outcome_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same whatever was accepted, and a GPU has nothing to do behind an outcome."""
    run, events = Run("adaserve", overlap=True), []
    run.step()

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            events.append(f"{owner.__name__}.{name}")
            return inner(*args)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (BatchRequests, "of"),
        (Settings, "of"),
        (QueuedCopy, "read"),
        (BatchRequests, "running"),
    ):
        noted(owner, name)
    run.step()
    assert events[:3] == ["Settings.of", "BatchRequests.of", "QueuedCopy.read"]
    assert events.index("BatchRequests.running") > 2, "it needs the lengths"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", ["none", "adaserve"])
def test_policies_change_while_requests_run(first: str, device: str) -> None:
    """A policy that drafts takes over from one that does not: the draft reads up on what it missed."""
    run = Run(first, overlap=True, device=device, copied=True, draft_knows_prompts=first != "none")
    # Twice: what is drafted early is what the policy before had in mind.
    names = itertools.cycle([first, first, "chain-3", "chain-3", "none", "priced"])
    built = {n: build_policy(n, policy_config()) for n in ("none", "adaserve", "chain-3", "priced")}
    while min(map(len, run.got)) < TOKENS:
        run.policies.current = built[next(names)]
        run.step()
    run.loop.settle()
    run.check()
    chains = [o for o in run.outcomes if o.plan.draft.depth == 3 and o.plan.draft.width == 1]
    assert chains and all(o.accepted.sum() == o.selection.keep.sum() for o in chains), (
        "the draft missed something"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_catching_up_is_no_price_of_drafting(device: str) -> None:
    """Reading what the draft had missed takes 0.3 s here; the draft's steps take none of it."""
    run = Run("chain-3", overlap=False, device=device, draft_knows_prompts=False)
    inner = run.draft.hidden

    def slow(inputs: Inputs) -> torch.Tensor:
        time.sleep(0.3 if len(inputs.tokens) > 12 else 0.0)
        return inner(inputs)

    run.draft.hidden = slow  # type: ignore[method-assign]
    run.step()
    first = run.outcomes[0]
    assert first.trees.n_nodes and first.total_s - first.draft_s - first.select_s - first.verify_s >= 0.3
    assert first.draft_s < 0.3


@pytest.mark.parametrize("device", DEVICES)
def test_the_draft_cache_holds_what_it_should(device: str) -> None:
    """After all those moves, a fresh prefill of the same tokens gives the same keys and values."""
    check_draft_cache(Run("adaserve", overlap=True, device=device).finish())


def check_draft_cache(run: Run) -> None:
    for source, model, seed in zip(run.beams, run.models, NOISE, strict=False):
        check_cache_of(run, source, model, noisy(TinyModel(run.requests.slots), seed))


def check_cache_of(run: Run, source: BeamSource, model: TinyModel, fresh: TinyModel) -> None:
    for r, req in enumerate(run.reqs):
        held = source.cache[req.req_pool_idx]
        cached = [*run.requests.text(r), *run.got[r]][:-1]
        assert held.length + len(held.pending) == len(cached)
        assert held.pending == cached[held.length :]
        check_kv(run, req.req_pool_idx, cached[: held.length], model, fresh)


def check_target_cache(run: Run) -> None:
    """It holds all that was said, as one plain forward writes it."""
    fresh = TinyModel(run.requests.slots)
    for r, req in enumerate(run.reqs):
        cached = [*run.requests.text(r), *run.got[r]][:-1]
        check_kv(run, req.req_pool_idx, cached, run.target, fresh)


def check_kv(run: Run, pool_row: int, tokens: list[int], model: TinyModel, fresh: TinyModel) -> None:
    slots, at = run.requests.req_to_token[pool_row, : len(tokens)], torch.arange(len(tokens))
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    fresh.hidden(Inputs(torch.tensor(tokens), at, slots, TreeAttentionPlan(ends, ends, slots)))
    for a, b in zip(fresh.k + fresh.v, model.k + model.v, strict=True):
        torch.testing.assert_close(a[slots.long()], b[slots.long()], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["none", "chain-3"])
def test_the_next_turn_drafts_on_a_whole_cache(device: str, policy: str) -> None:
    """An answer becomes the prefix of the next prompt: what the draft never saw of it is read then."""
    run = Run(policy, overlap=False, device=device, copied=True).finish()
    cache, table = run.source.cache, run.requests.req_to_token
    texts = [[*run.requests.text(r), *got][:-1] for r, got in enumerate(run.got)]
    prefixes = [len(t) for t in texts]
    rows = run.requests.pool_rows.tolist()
    for r in range(len(rows)):
        run.loop.finished(f"r{r}")
    run.draft.written.clear()
    cache.fill_holes(rows, prefixes, texts)
    read = sum(map(len, run.draft.written))
    assert (read > 0) if policy == "chain-3" else (read >= len(rows) * (TOKENS - 1))
    fresh = TinyModel(run.requests.slots)
    for row, text in zip(rows, texts, strict=True):
        slots = table[row, : len(text)]
        ends = torch.tensor([0, len(text)], dtype=torch.int32)
        at = torch.arange(len(text))
        fresh.hidden(Inputs(torch.tensor(text), at, slots, TreeAttentionPlan(ends, ends, slots)))
        for a, b in zip(fresh.k + fresh.v, run.draft.k + run.draft.v, strict=True):
            torch.testing.assert_close(a[slots.long()], b[slots.long()], rtol=1e-3, atol=1e-4)
    run.draft.written.clear()
    cache.fill_holes(rows, prefixes, texts)
    assert not run.draft.written, "holes are filled once"


def test_a_finished_request_is_forgotten_after_its_last_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    run, forgotten = Run("priced", overlap=True), []
    monkeypatch.setattr(run.policies, "forget", forgotten.append)
    run.step()
    run.loop.finished("r0")
    assert not forgotten
    run.step()  # SGLang had made this batch when it learned of the end
    run.step()
    assert forgotten == ["r0"]

"""What an iteration waits for, launches and uploads, counted operator by operator on a CPU.

On a CPU nothing has to wait, so what would wait on a GPU is told by the operators: reading a value
(``item``), finding true entries, taking a mask as an index, putting a number at indices. What may be waited
for are the copies to the host: of the last outcome, and of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaserve.engine import transfer
from adaserve.engine.beam_levels import Levels
from adaserve.engine.decode import DecodeLoop
from adaserve.engine.device_timing import HostMark
from adaserve.engine.gpu import attention, beam_search, device, forward, model, noise
from adaserve.engine.gpu.attention import SdpaKernel
from adaserve.engine.gpu.device import GpuDevice
from adaserve.engine.gpu.graphs import EagerGraph
from adaserve.engine.gpu.mixed import MixedForward
from adaserve.engine.gpu.prompts import PromptForward, ShortPrompts
from adaserve.engine.gpu.sizes import SearchKey
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.transfer import QueuedCopy, StaticArrays
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import PLAIN, SIZES, Requests, TinyModel, device_forward
from tests.engine.gpu.test_decode import Run
from tests.engine.gpu.test_prompts import forward_batch

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::unique2",
         "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor")  # fmt: skip
VIEWS = ("view", "slice", "select", "expand", "unsqueeze", "squeeze", "t.default", "transpose", "alias",
         "as_strided", "detach", "empty", "split", "_unsafe_view", "permute", "lift_fresh",
         "reshape", "unbind")  # fmt: skip
"""Operators that launch nothing."""


class Watch(TorchDispatchMode):
    """Counts what would be launched; remembers what the host, or an output's shape, would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches = self.graphs = 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Watch:
        """``cpu`` of what is on a CPU runs no operator."""
        inner = torch.Tensor.cpu

        def cpu(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            self.waits.append("cpu")
            return inner(tensor, *args)

        self._patch.setattr(torch.Tensor, "cpu", cpu)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        indices = args[1] if name.startswith(("aten::index.", "aten::index_put")) else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        is_number = name.startswith("aten::index_put") and not args[2].dim()  # torch sends it, and waits
        if name in WAITS or by_mask or is_number:
            self.waits.append(name)
        self.launches += not name.removeprefix("aten::").startswith(VIEWS)
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu(watch: Watch, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is in a graph is launched by one call, but may not wait either; one kernel walks all trees, one
    says where what it accepts belongs, one moves a pool's KV, one gives a draft what it begins with, one
    shortens its keys, and one writes candidates that nobody has read. The models and their reference kernel
    may do as they like."""
    model, replay, move = TinyModel.__call__, EagerGraph.replay, GpuDevice.move
    begin, shorten = beam_search.begin_with, SdpaKernel.shorten
    accept, moves = verify.accept, verify.moves

    def call(self: TinyModel, *args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return model(self, *args)

    def replayed(self: EagerGraph) -> Any:
        before = watch.launches
        output = replay(self)
        watch.launches, watch.graphs = before + 1, watch.graphs + 1
        return output

    def moved(self: GpuDevice, pool: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        watch.launches += 1
        with torch.utils._python_dispatch._disable_current_modes():
            move(self, pool, target, source)

    def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any) -> Any:
            watch.launches += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*args)

        return launched

    def walked(t: Any, draws: torch.Tensor, n: int, deepest: int, stride: int) -> Any:
        return (kernel(accept) if deepest else accept)(t, draws, n, deepest, stride)

    patch.setattr(verify, "accept", walked)
    patch.setattr(verify, "moves", kernel(moves))
    patch.setattr(beam_search, "begin_with", kernel(begin))
    patch.setattr(forward, "write_nodes", kernel(forward.write_nodes))
    patch.setattr(SdpaKernel, "shorten", kernel(shorten))
    patch.setattr(TinyModel, "__call__", call)
    patch.setattr(GpuDevice, "move", moved)
    patch.setattr(EagerGraph, "replay", replayed)
    with watch:
        yield


def test_the_watch_sees_what_waits() -> None:
    with Watch() as watch:
        x = torch.arange(3)
        int(x[1])
        x[x > 1]
        x[x > 1] = 0
        x[torch.arange(2)] = 0
        torch.nonzero(x)
        x.cpu()
    assert len(watch.waits) >= 6 and watch.launches >= 5


MAX_LAUNCHES = {"none": 15, "adaserve": 15, "chain-3": 11, "priced": 15}
"""Of one iteration at depth 4 at most, graphs among them. Lower them when you can."""


@pytest.mark.parametrize(
    ("policy", "unread"), [*((policy, False) for policy in MAX_LAUNCHES), ("chain-3", True)]
)
@pytest.mark.parametrize("is_early", [False, True])
def test_an_iteration(policy: str, is_early: bool, unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``unread``: the candidates that are read are those of the last iteration, which are there by then."""
    run, read, uploads, watch = Run(policy, overlap=True), [], [], Watch()
    if not unread:
        monkeypatch.setattr(DecodeLoop, "_may_go_unread", lambda *args: False)
    run.loop.device.drafts[0].follows = is_early  # type: ignore[misc]
    for _ in range(3):  # SGLang may exchange the slots of prompts at first
        run.step()
    inner, pack, put = QueuedCopy.read, transfer._pack, StaticArrays.put

    def counted(self: QueuedCopy) -> Any:
        if self._values is None:
            read.append(self)
        return inner(self)

    def packed(arrays: Any, *more: Any) -> Any:
        uploads.append(sorted(arrays))
        return pack(arrays, *more)

    def static(self: StaticArrays, arrays: Any, *more: Any) -> Any:
        uploads.append(sorted(arrays))
        return put(self, arrays, *more)

    monkeypatch.setattr(QueuedCopy, "read", counted)
    monkeypatch.setattr(transfer, "_pack", packed)
    monkeypatch.setattr(StaticArrays, "put", static)
    with as_on_a_gpu(watch, monkeypatch):
        run.loop.decode(run.batch(), None)
    assert watch.waits == []
    assert run.loop._arriving is not None
    drafted = run.loop._arriving.proposal.trees.n_nodes > 0
    assert drafted or policy in ("none", "priced")
    if policy == "priced" and is_early and drafted != (run.loop._ahead is not None):
        return  # it has just begun to draft, or ended it
    assert (run.loop._ahead is not None) == (is_early and drafted)
    assert run.loop._arriving.unread == unread
    assert len(read) == 1 + drafted, "the last outcome, and the candidates"
    assert watch.graphs == 1 + drafted, "a draft with all its steps, and a verification"
    assert watch.launches <= MAX_LAUNCHES[policy] + unread
    count = 2 + drafted + (drafted and is_early)
    assert len(uploads) == count, f"for each graph, and for the walk behind a verification: {uploads}"
    inputs, walk = (next(i for i, names in enumerate(uploads) if n in names) for n in ("inputs", "root"))
    assert (walk < inputs) == unread, "the walk's need not be there before, unless more is written to them"


@pytest.mark.parametrize("policy", ["none", "adaserve"])
def test_an_iteration_that_reads_a_prompt(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same graph; the prompt's logits are kept by one copy."""
    run, watch = Run(policy, overlap=True), Watch()
    target = run.loop.device.target
    assert isinstance(target, forward.GpuForward)
    target.mixed = MixedForward(target)
    for _ in range(3):
        run.step()
    zero, length = np.zeros(1, np.int64), np.array([60])
    run.loop.read_beside(TreeBatch.causal(np.arange(60), zero, zero, length))
    with as_on_a_gpu(watch, monkeypatch):
        run.loop.decode(run.batch(), None)
    assert watch.waits == [] and run.loop._arriving is not None and target.prompt_logits is not None
    assert watch.graphs == 1 + (run.loop._arriving.proposal.trees.n_nodes > 0)
    assert watch.launches <= MAX_LAUNCHES[policy] + 1


def test_marks_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is read late, that takes no time that would have to be known."""
    run, marks = Run("adaserve", overlap=True), []
    run.step()
    monkeypatch.setattr(device, "mark", lambda device: marks.append(HostMark()) or marks[-1])
    run.step()
    assert run.loop._arriving is not None
    noted, draft = run.loop._arriving.marks, run.loop._arriving.draft
    assert not draft.caught_up and noted.resumed is draft.span[1] and run.loop._ahead is not None
    next_one = run.loop._ahead.proposed.span
    assert marks == [*draft.span, noted.accepted, *next_one]
    marks.clear()
    run.step()
    noted, draft = run.loop._arriving.marks, run.loop._arriving.draft
    assert draft.span == next_one, "its draft was there before"
    assert marks[:2] == [noted.resumed, noted.accepted]
    assert noted.resumed.seconds_until(noted.verifying) > 0 < noted.verifying.seconds_until(noted.accepted)


def test_kv_moves_behind_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the outcome, and for nothing else of an iteration's end."""
    run, order = Run("adaserve", overlap=True), []

    def noted(name: str) -> Callable[..., Any]:
        inner = getattr(GpuDevice, name)

        def call(*args: Any, **named: Any) -> Any:
            order.append(name)
            return inner(*args, **named)

        return call

    for name in ("get", "move"):
        monkeypatch.setattr(GpuDevice, name, noted(name))
    run.step()
    assert order == ["get", "move", "move"]


def test_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's forward is queued behind the target's, with one upload and in one graph."""
    requests, uploads = Requests([5, 17]), []
    draft = device_forward(requests, TinyModel(requests.slots), SIZES.drafts())
    draft.reader = reader = PromptForward(draft.parts)
    prompts = ShortPrompts(draft, reader, None)
    texts, cuda = [requests.text(r) for r in range(2)], GpuDevice(draft, draft)
    model = SimpleNamespace(extend=prompts.execute)
    cache = DraftCache(draft, requests.req_to_token, requests.slots, stride=4)
    source = BeamSource(cuda, cache, PLAIN, 48, model=model)
    slots = [
        requests.req_to_token[row, :n] for row, n in zip(requests.pool_rows, requests.lengths, strict=True)
    ]
    reqs = [SimpleNamespace(origin_input_ids=t, output_ids=[], multimodal_inputs=None) for t in texts]
    batch = forward_batch(
        requests, [5, 17], [0, 0], reqs=reqs,
        prefix_lens=[0, 0], extend_lens=[5, 17], out_cache_loc=torch.cat(slots),
    )  # fmt: skip
    batch.req_pool_indices = batch.seq_lens = None  # which are on the device
    put = StaticArrays.put
    monkeypatch.setattr(StaticArrays, "put", lambda *args: uploads.append(1) or put(*args))
    with as_on_a_gpu(watch := Watch(), monkeypatch):
        source.prefilled(batch, True)
    assert watch.waits == [] and watch.graphs == 1 and len(uploads) == 1
    assert cache.has_all(requests.pool_rows.tolist())


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("iterations", [0, 1])
def test_a_request_ends(iterations: int, unheard: bool) -> None:
    """SGLang's scheduler tells of it while the next iteration runs, for which it would wait. It may end with
    its prefill."""
    requests = Requests([5, 17])
    cache = DraftCache(device_forward(requests, TinyModel(requests.slots), []), requests.req_to_token,
                       requests.slots, stride=4)  # fmt: skip
    row, text = int(requests.pool_rows[0]), requests.text(0)
    with Watch() as watch:
        cache.started(row, text, requests.req_to_token[row, : len(text)], read=True)
        if iterations:
            cache.advanced(row, [3, 4], known=1)
        cache.finished(row, unheard)
    assert watch.waits == []


def test_a_new_request_that_nobody_drafts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may exchange its slots, so that they are looked at after its first iteration. No draft ahead of
    it may be on its way then, for which that would wait."""
    run = Run("adaserve", overlap=True)
    for _ in range(3):
        run.step()
    run.loop.settle()  # as before every prefill
    assert run.loop._ahead is not None
    req, cache, looked = run.reqs[0], run.source.cache, []
    req.sampling_params.max_new_tokens = len(run.got[0]) + 1
    text = [*run.requests.text(0), *run.got[0]][:-1]
    row, inner = req.req_pool_idx, cache._held_lengths

    def held_lengths(*args: Any) -> Any:
        looked.append(run.loop._ahead)
        return inner(*args)

    monkeypatch.setattr(cache, "_held_lengths", held_lengths)
    cache.started(row, text, run.requests.req_to_token[row, : len(text)], read=True)
    run.step()
    assert run.loop._arriving is not None and not run.loop._arriving.rows.running.max_depth[0]
    assert run.loop._ahead is None and not looked
    run.step()
    assert looked == [None], "once, before the next draft"
    assert run.loop._ahead is not None


MAX_LAUNCHES_OF_A_STEP = 6
"""Of a draft with three beams, besides its model's. Each takes 1 to 2 us, in a step of a millisecond."""


def test_a_draft_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one level more launches, which a graph hides from the count of an iteration."""
    requests = Requests([5, 17])

    def of_kernels(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any, **named: Any) -> Any:
            watch.launches += count
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*args, **named)

        return launched

    monkeypatch.setattr(noise, "best", of_kernels(2, noise.best))
    monkeypatch.setattr(Levels, "grow", of_kernels(1, Levels.grow))
    monkeypatch.setattr(attention, "change_tree_mask", of_kernels(1, attention.change_tree_mask))
    launched = []
    for depth in (4, 5):
        forward = device_forward(requests, TinyModel(requests.slots), [])
        with as_on_a_gpu(watch := Watch(), monkeypatch):
            forward.capture(SearchKey(2, (3,) * depth))
        launched.append(watch.launches)
    assert launched[1] - launched[0] <= MAX_LAUNCHES_OF_A_STEP


class LateMark:
    """An event: how long it is to another one is known only when the device has come to both."""

    queued = reached = 0

    def __init__(self) -> None:
        LateMark.queued += 1
        self.number = LateMark.queued

    def seconds_until(self, later: Any) -> float:
        assert max(self.number, later.number) <= LateMark.reached, "the device is not there yet"
        return (later.number - self.number) * 1e-3

    def wait(self) -> None:
        LateMark.reached = max(LateMark.reached, self.number)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", ["model", "model,second", "model,suffix"])
def test_nothing_is_timed_before_it_has_run(
    drafts: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events must be complete when they are asked: the draft that is on its way is none of the last one's."""
    run = Run("adaserve", overlap, drafts=drafts)
    create, read = QueuedCopy.__init__, QueuedCopy.read

    def created(self: QueuedCopy, tensors: Any) -> None:
        create(self, tensors)
        self.behind = LateMark.queued  # type: ignore[attr-defined]

    def waited(self: QueuedCopy) -> Any:
        LateMark.reached = max(LateMark.reached, self.behind)  # type: ignore[attr-defined]
        return read(self)

    monkeypatch.setattr(LateMark, "queued", 0)
    monkeypatch.setattr(LateMark, "reached", 0)
    monkeypatch.setattr(QueuedCopy, "__init__", created)
    monkeypatch.setattr(QueuedCopy, "read", waited)
    for module in (model, device):
        monkeypatch.setattr(module, "mark", lambda device: LateMark())
    for _ in range(4):
        run.step()
    run.loop.settle()
    assert len(run.outcomes) == 4
    times = run.loop.times.report()
    assert 0 < times["target_s"] < times["decode_s"] and 0 < times["draft_s"] < times["decode_s"]

"""What the worker does between iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adaserve.engine import worker as module
from adaserve.engine.request_state import RequestState
from adaserve.engine.requests import Requests
from adaserve.engine.time_breakdown import TimeBreakdown
from adaserve.engine.worker import AdaServeWorker
from adaserve.scheduler.interface import IterationOutcome
from adaserve.slo.classes import SLO
from tests.engine.gpu.test_decode import Run


def test_noise_is_of_the_seed_that_sglang_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments have none, unless one was given: all servers would draw the same."""
    for name in ("ensure_registered", "require_supported_model", "require_own_positions", "require_windows"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(module, "draft_paths", lambda config: ())
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(dp_rank=None))
    model = SimpleNamespace(model=None, model_config=SimpleNamespace(context_len=9))
    worker = AdaServeWorker(
        SimpleNamespace(random_seed=None), 0, 0, SimpleNamespace(random_seed=7, model_runner=model)
    )
    assert worker._requests._seed == (7, 0)


NONE = torch.zeros(0)


def prompts(**more: Any) -> Any:
    """SGLang's batch of them."""
    fields: dict[str, Any] = {
        "reqs": [], "sampling_info": None, "seq_lens": NONE, "seq_lens_cpu": NONE, "prefix_lens": [],
        "extend_num_tokens": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def prefilling(order: list[str], told: list[Any]) -> Any:
    """A worker as far as a prefill reads it: ``order`` of what it calls, and what it has ``told``."""

    def forward(batch: Any) -> Any:
        order.append("forward")
        return SimpleNamespace(next_token_ids=torch.zeros(0, dtype=torch.int32))

    device = SimpleNamespace(
        shift=SimpleNamespace(start=lambda batch: order.append("shift")),
        target=SimpleNamespace(forget_read=lambda: order.append("forget")),
    )
    worker: Any = SimpleNamespace(
        target_worker=SimpleNamespace(forward_batch_generation=forward),
        loop=SimpleNamespace(
            settle=lambda: order.append("settle"),
            read_beside=lambda batch: order.append("read"),
            times=TimeBreakdown(),
            sources=[],
            device=device,
            free_s=lambda: worker.loop.times.last_end_s + 2.0,
            decisions=SimpleNamespace(prefilled=lambda tokens, seconds: told.append(seconds)),
        ),
        ledger=SimpleNamespace(prefilled=lambda reqs, seconds: told.append(seconds)),
        prefill=SimpleNamespace(
            observe_prefill=lambda tokens, seconds, _: told.append(seconds),
            observe_beside=lambda tokens, seconds: told.append("beside") or 7.0,
        ),
        _start_requests=lambda batch, tokens: None,
        _read=None,
    )
    return worker


def test_a_prefill_is_queued_behind_an_iteration_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome is read after that, and waiting for it is not the prefill's time."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    order: list[str] = []
    told: list[float] = []

    def settle() -> None:
        """The iteration goes on for 5 s, and the draft that was queued behind it for 2."""
        order.append("settle")
        clock.now_s += 5.0
        worker.loop.times.last_end_s = clock.now_s
        clock.now_s += 2.25

    worker = prefilling(order, told)
    worker.loop.settle = settle
    AdaServeWorker._prefill(worker, prompts(), None)
    assert order == ["forget", "shift", "forward", "forget", "settle"]
    assert told == [0.25, 0.25, 0.25] and worker.loop.times.report()["prefill_s"] == 0.25


def test_what_was_read_of_prompts_is_for_them_alone() -> None:
    """If SGLang prefills others next, it is dropped, and these are prefilled as usual."""
    two = {"prefix_lens": [], "extend_lens": [], "prefill_input_ids_cpu": NONE, "req_pool_indices_cpu": NONE}
    order: list[str] = []
    told: list[Any] = []
    worker, mine = prefilling(order, told), prompts(**two)
    AdaServeWorker.read_beside(worker, mine)
    AdaServeWorker._prefill(worker, mine, None)
    assert order == ["shift", "read", "forward", "forget", "settle"]
    assert told == ["beside", 7.0], "it counts as a prefill of its own"
    for again in (prompts(**two), mine):
        order.clear()
        AdaServeWorker.read_beside(worker, mine)
        AdaServeWorker._prefill(worker, prompts(**two), None)
        AdaServeWorker._prefill(worker, again, None)
        assert order == ["shift", "read", *["forget", "shift", "forward", "forget", "settle"] * 2]


def test_model_time_of_loops_is_without_prefills() -> None:
    """A draft reads prompts, too, between two iterations."""

    def runs(seconds: float) -> list[Any]:
        return [(SimpleNamespace(seconds_until=lambda end: end - 1.0), 1.0 + seconds)]

    def ended(
        end_s: float, since_last_s: float, unread: bool = False, nodes: int = 3, chunk: int = 0, **more: Any
    ) -> Any:
        trees, plan = SimpleNamespace(n_nodes=nodes), SimpleNamespace(takes_all=unread)
        times = {
            "total_s": 0.04, "since_last_s": since_last_s, "end_s": end_s, "prefill_tokens": chunk,
        }  # fmt: skip
        return cast(IterationOutcome, SimpleNamespace(plan=plan, trees=trees, **times, **more))

    times = TimeBreakdown()
    times.decoded(ended(1.0, 0.5, prefilled=True, chunk=40), [runs(0.01), runs(0.3)])
    times.decoded(ended(1.05, 0.05, unread=True, prefilled=False), [runs(0.01), runs(0.02) * 2])
    said = times.report()
    assert (said["iterations"], said["loops"], said["mixed"]) == (2.0, 1.0, 1.0)
    assert said["target_s"] == pytest.approx(0.02) and said["draft_s"] == pytest.approx(0.34)
    assert said["loop_s"] == pytest.approx(0.05) and said["loop_models_s"] == pytest.approx(0.05)
    assert not said["stalls"] and said["unread"] == 1.0
    times.decoded(ended(1.2, 0.09, unread=True, nodes=0, prefilled=False), [runs(0.01), runs(0.02)])
    assert times.report()["unread"] == 1.0, "there was nothing to read"
    assert times.report()["stalls"] == 1.0 and times.report()["stalled_s"] == pytest.approx(0.06)


class Request:
    """One of SGLang's, as far as the worker reads it when its prompt was read."""

    def __init__(self, rid: str) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, [5] * 8, list[int]()
        self.sampling_params = SimpleNamespace(custom_params=None)


def test_a_prompt_is_recorded_when_all_of_it_was_read() -> None:
    """What was drawn behind a part of it means nothing, and nobody may wait for its logits."""
    told: list[Any] = []
    tap = SimpleNamespace(
        started=lambda req, state: told.append((req.rid, state.generated)),
        finished=lambda rid: told.append((rid, "closed")),
    )
    worker: Any = SimpleNamespace(
        _requests=Requests((1, 0)),
        ledger=SimpleNamespace(slo=lambda req: SLO("default")),
        loop=SimpleNamespace(tap=tap),
    )
    long, short = Request("long"), Request("short")

    def prefilled(reqs: list[Request], rows: list[int], tokens: list[int], chunked: Request | None) -> None:
        batch = SimpleNamespace(reqs=reqs, req_pool_indices_cpu=torch.tensor(rows), chunked_req=chunked)
        AdaServeWorker._start_requests(worker, batch, tokens)

    prefilled([long], [0], [21], chunked=long)
    prefilled([long, short], [0, 1], [22, 23], chunked=long)
    prefilled([long], [0], [24], chunked=None)
    assert told == [("long", "closed"), ("long", "closed"), ("short", [23]), ("long", [24])]


def begun(requests: Requests, req: Request, row: int, now_s: float) -> tuple[RequestState, str | None]:
    return requests.start(req, row, 5, SLO("default"), now_s)


def test_a_number_brings_back_the_noise_of_who_had_it() -> None:
    """The same requests in the same order say the same again."""
    requests, other = Requests((1, 0)), Requests((2, 0))
    keys = [begun(requests, Request(f"r{row}"), row, 0.0)[0].key for row in range(4)]
    assert len({*keys, begun(other, Request("r"), 0, 0.0)[0].key}) == 5
    requests.number(2)
    assert [begun(requests, Request(f"again{row}"), row, 1.0)[0].key for row in range(2)] == keys[1:3]


def test_a_retraction_changes_neither_clock_nor_noise() -> None:
    """Its row is somebody else's by then."""
    requests, taken_back = Requests((1, 0)), Request("back")
    first, lost = begun(requests, taken_back, 0, 1.0)
    assert lost is None
    other, lost = begun(requests, Request("other"), 0, 2.0)
    assert lost == "back" and "back" not in requests and requests.end("back") is None
    taken_back.output_ids = [5, 6]
    second, lost = begun(requests, taken_back, 1, 3.0)
    assert lost is None and requests.at([0, 1]) == [other, second]
    assert (second.key, second.decode_start_s, second.decoded) == (first.key, 1.0, 2)


@pytest.mark.parametrize("holds_row", [True, False])
def test_who_leaves_is_forgotten_behind_the_last_outcome(holds_row: bool) -> None:
    """SGLang may abort a request in the queue while the iteration that it was in still runs. The outcome
    would bring it back, for as long as the server lives."""
    run, told = Run("none", overlap=True), list[str]()
    run.step()
    run.loop.requests._row["r1"] = run.reqs[1].req_pool_idx
    run.loop.observed = lambda _: told.append("outcome")
    run.loop.forget = told.append  # type: ignore[method-assign]
    worker: Any = SimpleNamespace(loop=run.loop, _requests=run.loop.requests)
    for _ in range(2):  # of one that is gone nothing is left to forget
        AdaServeWorker.ended_early(worker, "r1", holds_row)
    assert told == [] and "r1" not in run.loop.requests
    run.loop.settle()
    assert told == ["outcome", "r1"]


def test_a_trainer_hears_of_the_requests_that_run() -> None:
    """One that was taken back, or whose prompt is read in parts, has a clock as well."""
    run, seen = Run("none", overlap=False), list[list[str]]()
    run.loop.requests.states[99] = RequestState("waits", "default", 0.02, 0.0, generated=[5])
    run.loop.requests._row["waits"] = 99
    run.loop.learner = cast(Any, SimpleNamespace(look=lambda states, _: seen.append([s.rid for s in states])))
    run.step()
    assert seen == [["r0", "r1", "r2", "r3"]]

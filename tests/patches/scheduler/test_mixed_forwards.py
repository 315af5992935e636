"""What SGLang's scheduler does with a decode iteration beside prompts; no server."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from adaserve.patches.scheduler.mixed_forwards import _advance_grammars, _finishing, _process, _run

MOST = 16


def own(name: str) -> Any:
    """SGLang's function, which other tests may have hooked."""
    function = getattr(Scheduler, name)
    return getattr(function, "__wrapped__", function)


@dataclasses.dataclass(eq=False)
class Request:
    """The fields of SGLang's Req that are read."""

    rid: str
    left: int = 9
    beam_group = None

    def next_output_finishes_by_length(self) -> bool:
        return self.left <= 1


@dataclasses.dataclass
class Batch:
    """The same of its ScheduleBatch."""

    reqs: list[Request]
    forward_mode: ForwardMode = ForwardMode.DECODE
    prefill_input_ids_cpu: torch.Tensor | None = None
    extend_num_tokens: int = 0
    input_embeds: Any = None
    replace_embeds: Any = None
    multimodal_inputs: list[Any] | None = None
    is_prefill_only: bool = False
    has_memory: bool = True
    launch_ts: float = 0.0

    def is_empty(self) -> bool:
        return not self.reqs

    def check_decode_mem(self) -> bool:
        return self.has_memory

    def copy(self) -> Batch:
        return dataclasses.replace(self, reqs=list(self.reqs))


def prompts(*rids: str, tokens: int = MOST, **more: Any) -> Batch:
    reqs, ids = [Request(rid) for rid in rids], torch.ones(tokens)
    return Batch(reqs, ForwardMode.EXTEND, ids, tokens, **more)


class Loop:
    """SGLang's scheduler, as far as steps go; ``told`` is what happens in them."""

    _copy = own("record_batch_in_overlap")

    def __init__(self, *running: str, overlap: bool = False, most: int = MOST) -> None:
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.running_batch = Batch([Request(rid) for rid in running])
        self.enable_overlap = self.enable_skip_finishing_decode = overlap
        self.result_queue: list[Any] = []
        self.batch_record_buf: list[Any] = [None, None]
        self.batch_record_ct = 0
        self.draft_worker = SimpleNamespace(
            prefill=SimpleNamespace(most_beside=lambda policy: most),
            policies=SimpleNamespace(current=SimpleNamespace(name="priced")),
            read_beside=lambda batch: self.tell("read", batch),
        )
        self.batch_result_processor = SimpleNamespace(
            advance_grammar_fsm=lambda result, batch: self.tell("grammar", batch)
        )
        self.now = 0.0

    def tell(self, what: str, batch: Batch) -> None:
        self.told.append((what, tuple(req.rid for req in batch.reqs)))

    def update_running_batch(self, batch: Batch) -> Batch | None:
        self.tell("prepared", batch)
        return batch

    def _reqs_finishing_inflight(self, batch: Batch) -> list[Request]:
        return _finishing(own("_reqs_finishing_inflight"), self, batch)

    def run(self, batch: Batch) -> Any:
        """One step up to its result, which waits under overlap."""

        def original(_: Any, one: Batch) -> Any:
            self.tell("ran", one)
            self.now += 1.0
            one.launch_ts = self.now
            if self.enable_overlap:
                self._copy(one)
            return SimpleNamespace()

        result = _run(original, self, batch)
        self.result_queue.append((batch.copy(), result))
        return result

    def process(self) -> None:
        _process(lambda _, batch, result: self.tell("processed", batch), self, *self.result_queue.pop(0))


def test_those_that_run_decode_before_the_prompts_and_are_processed_first() -> None:
    loop, batch = Loop("a", "b"), prompts("c")
    loop.run(batch)
    loop.process()
    ran, read = ("a", "b"), ("c",)
    assert loop.told[:2] == [("prepared", ran), ("read", read)]
    assert loop.told[2:] == [("ran", ran), ("ran", read), ("processed", ran), ("processed", read)]
    assert batch.launch_ts == 1.0, "reading them began with the iteration"
    loop.told.clear()
    loop.run(loop.running_batch)
    loop.process()
    assert loop.told == [("ran", ran), ("processed", ran)]


@pytest.mark.parametrize(
    ("batch", "running"),
    [
        (prompts("c", tokens=MOST + 1), {}),
        (prompts("c", input_embeds=torch.ones(1)), {}),
        (prompts("c", replace_embeds=torch.ones(1)), {}),
        (prompts("c", multimodal_inputs=[None, object()]), {}),
        (prompts("c", tokens=0), {}),
        (prompts("c"), {"reqs": []}),
        (prompts("c"), {"is_prefill_only": True}),
        (prompts("c"), {"has_memory": False}),
        (dataclasses.replace(prompts("c"), prefill_input_ids_cpu=None), {}),
        (dataclasses.replace(prompts("c"), forward_mode=ForwardMode.IDLE), {}),
    ],
)
def test_prompts_that_share_no_forward(batch: Batch, running: dict[str, Any]) -> None:
    """Other inputs than tokens, too many, nobody who decodes, or no room for those who do."""
    loop = Loop("a")
    loop.running_batch = dataclasses.replace(loop.running_batch, **running)
    loop.run(batch)
    loop.process()
    assert loop.told == [("ran", ("c",)), ("processed", ("c",))]


def test_text_beside_images_of_nobody_shares_a_forward() -> None:
    loop = Loop("a")
    loop.run(prompts("c", multimodal_inputs=[None]))
    assert ("read", ("c",)) in loop.told
    loop = Loop("a", most=0)  # as the settings say
    loop.run(prompts("c"))
    assert loop.told == [("ran", ("c",))]


@pytest.mark.parametrize("left", [None, Batch([])])
def test_if_all_are_about_to_finish_nothing_is_read_beside_them(
    left: Batch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop("a")
    monkeypatch.setattr(loop, "update_running_batch", lambda batch: left)
    loop.run(prompts("c"))
    assert loop.told == [("ran", ("c",))]


def test_grammars_advance_by_both_results_that_wait() -> None:
    loop = Loop("a", overlap=True)
    loop.run(prompts("c"))
    loop.told.clear()
    _advance_grammars(own("_advance_pending_grammar"), loop)
    assert loop.told == [("grammar", ("a",)), ("grammar", ("c",))]
    loop.process()
    loop.run(loop.running_batch)
    loop.told.clear()
    _advance_grammars(own("_advance_pending_grammar"), loop)
    assert loop.told == [("grammar", ("a",))]


def test_who_gets_its_last_token_beside_prompts_does_not_decode_again() -> None:
    loop, batch = Loop("a", "b", overlap=True), prompts("c")
    a, b, c = *loop.running_batch.reqs, *batch.reqs
    assert loop._reqs_finishing_inflight(loop.running_batch) == []
    loop.run(batch)
    b.left = c.left = 1
    assert loop._reqs_finishing_inflight(Batch([a, b, c])) == [c, b]
    loop.process()
    assert loop._reqs_finishing_inflight(Batch([a, b, c])) == []


def test_what_a_step_runs_is_kept_until_the_second_one_after_it() -> None:
    """SGLang keeps what its last two launches read, so that no tensor is freed that the device works with.
    The results of the step before are read while the next one is launched."""

    def kept(records: Any) -> set[str]:
        """Requests of all batches in them."""
        if isinstance(records, Batch):
            return {req.rid for req in records.reqs}
        return set().union(*map(kept, records)) if isinstance(records, list) else set()

    loop = Loop("a", overlap=True)
    last: set[str] = set()
    for number, mixed in enumerate([True, False, True, True, True, False, False, True]):
        loop.running_batch = Batch([Request(f"decodes {number}")])
        batch = prompts(f"prompt {number}") if mixed else loop.running_batch
        mine = kept(batch) | kept(loop.running_batch)
        loop.run(batch)
        assert kept(loop.batch_record_buf) == last | mine, number
        last = mine

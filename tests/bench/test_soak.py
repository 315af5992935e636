"""The soak: each of its invariants fails when violated, and a short run on a real server holds them all."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from adaserve.bench.soak.answers import Answer, Choice, StreamReader, read_whole
from adaserve.bench.soak.calls import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    LEAVING,
    OLLAMA_GENERATE,
    REGEXES,
    SCHEMA,
    Call,
    Conversation,
    End,
)
from adaserve.bench.soak.checks import answer_faults, differences, status_faults, turn_faults
from adaserve.bench.soak.clients import Role
from adaserve.bench.soak.invariants import (
    GROWTH_MIB,
    MIN_SAMPLES,
    WARM_UP,
    MemorySample,
    ServerCounts,
    count_faults,
    idle_faults,
    log_faults,
    memory_growth,
    process_fault,
    snapshot_faults,
)
from adaserve.bench.soak.mix import Mix, greedy_cases
from adaserve.bench.soak.processes import ClientProcesses
from adaserve.bench.soak.report import INVARIANTS, Record, held, markdown, record_of
from adaserve.bench.soak.run import Soak, SoakPlan, _drive, run_soak
from adaserve.bench.soak.tally import Tally

TEXTS = ("def main(argv):\n    return 0\n", "import os\nimport sys\n", "A manual says what to do, and why.")


def native(**params: Any) -> Call:
    return Call("native", GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 3, **params}})


def good() -> Answer:
    """A right answer to ``native()``."""
    choice = Choice("a b c", "length", 3, 1, [5, 6, 7], None, "x")
    return Answer([choice], 3, 1, "default")


def changed(**values: Any) -> Answer:
    """The right answer with other values in its only sequence."""
    answer = good()
    return replace(answer, choices=[replace(answer.choices[0], **values)])


# -- answers -------------------------------------------------------------------------------------


def test_a_right_answer_has_no_faults() -> None:
    assert answer_faults(native(), good()) == []
    assert differences(good(), good()) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (changed(finish=None), "finish reason None"),
        (changed(finish="abort"), "finish reason 'abort'"),
        (changed(tokens=2, token_ids=[5, 6]), "ended by length after 2 tokens"),
        (changed(token_ids=[5, 6]), "2 token ids for 3 tokens"),
        (changed(logprobs=[-1.0]), "1 logprobs for 3 tokens"),
        (replace(good(), choices=[]), "0 sequences where 1"),
        (replace(good(), tokens=4), "4 tokens where 1 to 3"),
        (replace(good(), tokens=None), "how many tokens"),
        (replace(good(), slo_class="chat"), "served as class 'chat'"),
        (replace(good(), faults=["the stream broke off"]), "the stream broke off"),
    ],
)
def test_a_wrong_answer_is_noticed(answer: Answer, words: str) -> None:
    assert any(words in fault for fault in answer_faults(native(), answer))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (native(regex=REGEXES[0]), "yes, 7."),
        (native(json_schema=SCHEMA), '{"name": "fox"'),
        (native(json_schema=SCHEMA), "{}"),
    ],
)
def test_text_outside_its_grammar_is_noticed(call: Call, text: str) -> None:
    assert answer_faults(call, changed(text=text, finish="stop"))


def test_text_inside_its_grammar_is_not() -> None:
    assert not answer_faults(native(regex=REGEXES[0]), changed(text="yes, 77.", finish="stop"))
    assert not answer_faults(
        native(json_schema=SCHEMA), changed(text='{"name":"fox","ok":true}', finish="stop")
    )


def test_missing_logprobs_and_too_few_tokens_are_noticed() -> None:
    call = native()
    asked = replace(call, body={**call.body, "return_logprob": True})
    assert "no logprobs" in answer_faults(asked, good())
    assert answer_faults(native(min_new_tokens=3), replace(good(), tokens=2))


@pytest.mark.parametrize(
    "answer",
    [
        changed(text="a b d"),
        changed(token_ids=[5, 6, 8]),
        changed(finish="stop"),
        changed(logprobs=[-1.0, -2.0, -3.1]),
        replace(good(), tokens=2),
        replace(good(), choices=[]),
    ],
)
def test_any_difference_from_the_reference_is_noticed(answer: Answer) -> None:
    right = changed(logprobs=[-1.0, -2.0, -3.0]) if answer.choices and answer.choices[0].logprobs else good()
    assert differences(answer, right)


def test_a_logprob_may_differ_by_rounding_and_nan_may_not_pass() -> None:
    right = changed(logprobs=[-1.0, -2.0, -3.0])
    assert not differences(changed(logprobs=[-1.0, -2.0, -3.0001]), right)
    assert differences(changed(logprobs=[-1.0, -2.0, float("nan")]), right)


@pytest.mark.parametrize(
    ("call", "status", "right"),
    [
        (native(), 200, True), (native(), 400, False), (native(), 500, False), (native(), 503, False),
        (replace(native(), refused=True), 400, True), (replace(native(), refused=True), 200, False),
        (replace(native(), refused=True), 500, False), (replace(native(), end=End.ABORTED), 500, False),
    ],
)  # fmt: skip
def test_only_the_status_that_is_due_is_accepted(call: Call, status: int, right: bool) -> None:
    assert (status_faults(call, status, "") == []) is right


def test_a_turn_that_forgot_the_last_one_is_noticed() -> None:
    first = replace(good(), prompt_tokens=10)
    assert turn_faults(first, replace(good(), prompt_tokens=13)) == []
    assert turn_faults(first, replace(good(), prompt_tokens=4))


# -- streams -------------------------------------------------------------------------------------


def event(text: str, tokens: int, finish: str | None = None) -> str:
    meta = {
        "id": "x",
        "finish_reason": finish and {"type": finish},
        "completion_tokens": tokens,
        "prompt_tokens": 1,
        "slo": {"class": "default"},
    }
    return "data: " + json.dumps({"text": text, "output_ids": list(range(tokens)), "meta_info": meta})


def streamed(path: str, *lines: str) -> Answer:
    reader = StreamReader(path)
    for line in lines:
        reader.line(line)
    return reader.answer()


def test_a_whole_stream_is_put_together() -> None:
    answer = streamed(GENERATE, event("a", 1), "", event("a b", 3, "length"), "", "data: [DONE]")
    assert answer.faults == [] and answer.choices[0].text == "a b" and answer.tokens == 3


def part(text: str, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 1}})


def test_increments_are_joined() -> None:
    answer = streamed(COMPLETIONS, part("a"), part(" b"), part("", "stop"), USAGE, "data: [DONE]")
    assert answer.faults == [] and answer.choices[0].text == "a b" and answer.choices[0].finish == "stop"


@pytest.mark.parametrize(
    ("path", "lines", "words"),
    [
        (GENERATE, [event("a", 1)], "without its end mark"),
        (GENERATE, [event("a", 2), event("a", 1), "data: [DONE]"], "went back"),
        (GENERATE, [event("a", 2, "stop"), event("a", 2), "data: [DONE]"], "after the finish reason"),
        (GENERATE, ["data: [DONE]", event("a", 1)], "after its end"),
        (GENERATE, ['data: {"error": "x"}', "data: [DONE]"], "an error"),
        (COMPLETIONS, [part("a"), "data: [DONE]"], "no usage"),
        (COMPLETIONS, [part("a", "stop"), part("b"), USAGE, "data: [DONE]"], "after the finish reason"),
        (OLLAMA_GENERATE, ['{"response": "a", "done": false}'], "without its end mark"),
    ],
)
def test_a_broken_stream_is_noticed(path: str, lines: list[str], words: str) -> None:
    assert any(words in fault for fault in streamed(path, *lines).faults)


def test_whole_answers_of_the_openai_routes_are_read() -> None:
    body = {
        "choices": [{"index": 1, "message": {"content": "b"}, "finish_reason": "stop"},
                    {"index": 0, "message": {"content": None}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 5, "prompt_tokens": 2}, "metadata": {"slo": {"class": "chat"}},
    }  # fmt: skip
    answer = read_whole(CHAT, body)
    assert [c.text for c in answer.choices] == ["", "b"] and answer.tokens == 5 and answer.slo_class == "chat"


# -- the server as a whole -----------------------------------------------------------------------


def counts(requests: dict[str, float], tokens: dict[str, float], failed: float = 0) -> ServerCounts:
    return ServerCounts(Counter(requests), Counter(tokens), failed)  # type: ignore[arg-type]


def a_tally() -> Tally:
    tally = Tally()
    tally.served.update(chat=7, leaving=1)
    tally.served_tokens.update(chat=70, leaving=5)
    tally.maybe.update(leaving=3)
    tally.maybe_tokens.update(leaving=30)
    return tally


@pytest.mark.parametrize(
    ("chat", "chat_tokens", "leaving", "leaving_tokens", "failed", "faults"),
    [
        (107, 1070, 1, 5, 0, 0), (107, 1070, 4, 35, 0, 0), (106, 1070, 1, 5, 0, 1), (108, 1070, 1, 5, 0, 1),
        (107, 1069, 1, 5, 0, 1), (107, 1071, 1, 5, 0, 1), (107, 1070, 0, 5, 0, 1), (107, 1070, 5, 35, 0, 1),
        (107, 1070, 4, 36, 0, 1), (107, 1070, 1, 5, 1, 1),
    ],
)  # fmt: skip
def test_counters_that_do_not_add_up_are_noticed(
    chat: float, chat_tokens: float, leaving: float, leaving_tokens: float, failed: float, faults: int
) -> None:
    before = counts({"chat": 100}, {"chat": 1000})
    after = counts({"chat": chat, LEAVING: leaving}, {"chat": chat_tokens, LEAVING: leaving_tokens}, failed)
    assert len(count_faults(before, after, a_tally())) == faults


def test_a_request_of_a_class_that_no_client_used_is_noticed() -> None:
    assert count_faults(counts({}, {}), counts({"custom": 1}, {}), Tally())


def test_counters_are_read_from_prometheus() -> None:
    def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
        return name, frozenset(labels.items())

    metric = "adaserve:slo_requests_total"
    read = ServerCounts.of(
        {
            at(metric, slo_class="chat", objective="all", outcome="met"): 3.0,
            at(metric, slo_class="chat", objective="all", outcome="failed"): 2.0,
            at(metric, slo_class="chat", objective="tpot", outcome="met"): 9.0,
            at("adaserve:output_tokens_total", slo_class="chat"): 40.0,
        }
    )
    assert (read.requests, read.tokens, read.failed) == ({"chat": 5}, {"chat": 40}, 2)


def test_a_page_that_says_something_else_is_noticed() -> None:
    known = counts({"chat": 7}, {})
    assert snapshot_faults({"classes": [{"name": "chat", "total_requests": 7}]}, known) == []
    assert snapshot_faults({"classes": [{"name": "chat", "total_requests": 8}]}, known)


@pytest.mark.parametrize("name", ["num_running_reqs", "num_waiting_reqs", "num_used_tokens"])
def test_what_is_left_in_an_idle_server_is_noticed(name: str) -> None:
    load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
    assert idle_faults(load) == []
    assert idle_faults({**load, name: 1})


@pytest.mark.parametrize(
    "line",
    ["ValueError: token_to_kv_pool_allocator memory leak detected!", "Scheduler hit an exception: x",
     "Traceback (most recent call last):", "INFO: Child process [7] died"],
)  # fmt: skip
def test_a_bad_line_in_the_log_is_noticed(line: str) -> None:
    assert log_faults("Decode batch, #running-req: 3\n") == []
    assert len(log_faults(f"Decode batch\n{line}\n")) == 1


def memory_of(mib_per_sample: float, count: int, noise_mib: float = 5.0) -> list[MemorySample]:
    """A process that fills its caches first and then grows, and one that does not grow."""
    warm = int(count * WARM_UP)
    return [
        MemorySample(
            10.0 * i,
            {
                "scheduler": 1000 + 300 * min(1.0, i / warm) + mib_per_sample * i + noise_mib * (i % 3),
                "main": 500.0,
            },
        )
        for i in range(count)
    ]


def test_memory_that_grows_after_the_warm_up_is_noticed() -> None:
    count = 2 * MIN_SAMPLES
    late = count - int(count * WARM_UP)
    flat, growing = memory_of(0.0, count), memory_of(2 * GROWTH_MIB / late, count)
    assert [g.fault for g in memory_growth(flat)] == [None, None]
    faults = {g.role: g.fault for g in memory_growth(growing)}
    assert faults["main"] is None and faults["scheduler"] is not None


def test_a_process_that_was_replaced_is_noticed() -> None:
    first = MemorySample(0.0, {"main": 1.0, "worker:7": 1.0})
    assert process_fault(first, MemorySample(1.0, {"main": 2.0, "worker:7": 2.0})) is None
    fault = process_fault(first, MemorySample(1.0, {"main": 2.0, "worker:8": 2.0}))
    assert fault is not None and "worker:7" in fault and "worker:8" in fault


def test_memory_of_a_short_run_is_not_judged() -> None:
    short = memory_growth(memory_of(50.0, MIN_SAMPLES // 2))
    assert not any(g.judged or g.fault for g in short)


# -- the record ----------------------------------------------------------------------------------


def recorded(tally: Tally) -> Record:
    extra = {"quiet_points": 1, "probes": 1, "longest_probe_s": 0.1, "policy_changes": 1, "retractions": 1}
    made = {"git_sha": "0", "cpu": "some", "usable_cores": 2}
    return record_of(
        made=made, plan={"seed": 0}, tally=tally, samples=[], seconds=1.0, extra=extra, interrupted=False
    )


@pytest.mark.parametrize("invariant", sorted(INVARIANTS))
def test_a_violation_reaches_the_report(invariant: str) -> None:
    clients, tally = Tally(), Tally()
    clients.violate(invariant, "what was seen", 0.0)
    assert held(recorded(tally))
    tally.add(clients)
    record = recorded(tally)
    assert not held(record) and record["violations"] == {invariant: 1}
    assert "what was seen" in markdown(record)


def test_a_draft_that_was_never_swapped_has_no_last_time() -> None:
    learning = {"requests": 5, "swaps": 0, "swap_ms": 0.0, "rejected": 1}
    page = markdown({**recorded(Tally()), "learning": learning})
    assert "from 5 requests and was swapped 0 times; 1 candidates were rejected." in page
    page = markdown({**recorded(Tally()), "learning": {**learning, "swaps": 2, "swap_ms": 0.31}})
    assert "swapped 2 times, the last time in 0.3 ms; 1 candidates" in page


def test_what_ends_a_process_group_leaves_the_clients_to_the_soak() -> None:
    """Clients that a signal to all had ended would be violations of the server's."""
    answers = {number: (call, good()) for number, call in enumerate(greedy_cases(TEXTS, 0))}
    with ClientProcesses([Role("http://127.0.0.1:9", 0, 1, TEXTS, answers, 4096, 5.0)]) as clients:
        assert clients.pause(60.0), "it has not reported"
        (process,) = clients._processes
        assert os.getpgid(process.pid or 0) != os.getpgid(0)
        assert clients.take() == Tally()


def test_no_client_that_waits_to_be_killed_outlives_the_soak(tmp_path: Path) -> None:
    """Also where the server is gone, so that there is no last quiet point."""
    killed: list[str] = []
    server = SimpleNamespace(alive=False, why=lambda: "no memory")
    control = SimpleNamespace(metrics=dict)
    others: Any = SimpleNamespace(go=lambda: None, take=Tally)
    soak = Soak(SoakPlan(requests=1), cast(Any, server), cast(Any, control), others, others, {})
    soak._victims.append(cast(Any, SimpleNamespace(kill=lambda: killed.append("one"))))
    assert _drive(soak, tmp_path, Console(quiet=True)) and killed == ["one"]


# -- the mix -------------------------------------------------------------------------------------


def test_a_seed_names_a_mix_and_the_mix_has_everything() -> None:
    cases = greedy_cases(TEXTS, 0)
    one, same, other = (Mix(seed, TEXTS, cases, 4096) for seed in (3, 3, 4))
    drawn = [one.draw() for _ in range(1500)]
    assert drawn == [same.draw() for _ in range(1500)]
    assert drawn != [other.draw() for _ in range(1500)]
    calls = [c for plan in drawn for c in (plan.turns if isinstance(plan, Conversation) else [plan])]
    kinds = {c.kind for c in calls}
    wanted = {
        "regex", "json_schema", "penalties", "logit_bias", "logprobs", "n > 1", "batch", "session",
        "stop strings",        "min_new_tokens", "refused", "chat", "completions", "ollama",
    }  # fmt: skip
    assert wanted | {e.value for e in End if e is not End.ANSWERED} <= kinds
    assert any(c.pause_s for c in calls) and any(c.case is not None for c in calls)
    assert any("sampling_seed" in c.body.get("sampling_params", {}) for c in calls)


# -- a real server -------------------------------------------------------------------------------


def test_a_short_soak_holds_every_invariant(tmp_path: Path) -> None:
    plan = SoakPlan(
        minutes=0.25, workers=2, clients=2, lanes=10, cases=30, quiet_s=10.0, change_s=1.5, kill_s=3.0,
        learn=True,
    )  # fmt: skip
    data = run_soak(plan, tmp_path, Console(quiet=True))
    assert held(data), markdown(data)
    assert data["quiet_points"] >= 2 and data["policy_changes"] >= 3 and data["retractions"] > 0
    assert data["requests"] > 100 and data["compared_with_reference"] > 25
    assert data["by_kind"]["client killed"] > 0 and data["ends"]["abort"] > 0
    assert data["learning"]["recorded"] > 0 and "trainer" in {m["role"] for m in data["memory"]}
    assert json.loads((tmp_path / "soak.json").read_text())["requests"] == data["requests"]
    assert "All invariants held" in (tmp_path / "README.md").read_text()

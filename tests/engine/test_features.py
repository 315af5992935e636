"""What SGLang offers per request, with speculation: the same answers as without."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Served
from tests.engine.harness import Job, Server, run_jobs

PROMPTS = [[5, 17, 33, 99], [210, 44], [8, 8, 301, 77, 12, 400], [66], [123, 321, 222, 111, 90]]
TOLERANCE = 1e-4


def greedy(**params: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, **params}


PENALISED = [
    greedy(frequency_penalty=0.7),
    greedy(presence_penalty=1.1),
    greedy(repetition_penalty=1.3),
    greedy(min_new_tokens=30, ignore_eos=False),
    greedy(frequency_penalty=0.4, presence_penalty=0.3, min_new_tokens=12),
    greedy(repetition_penalty=1.1, min_new_tokens=12),
    greedy(logit_bias={"44": 6.0, "210": -8.0, "7": 2.5}),
    greedy(logit_bias={"9": 4.0}, presence_penalty=0.9),
    greedy(),
]
"""No repetition penalty beside one that is subtracted: SGLang alone applies them in the order of a set of
classes, which is another one in every process. Ours, SGLang's under overlap, is tested against the formula.
"""


def test_penalties_and_bias_mixed_with_plain_requests(served: Served, stock: Server) -> None:
    jobs = [Job(tuple(p), params) for p in PROMPTS for params in PENALISED]
    right = run_jobs(stock, jobs)
    got = run_jobs(served.server, jobs)
    for job, a, b in zip(jobs, got, right, strict=True):
        assert a is not None and b is not None
        assert a["output_ids"] == b["output_ids"], job.params
    plain = [b["output_ids"] for job, b in zip(jobs, right, strict=True) if b and job.params == PENALISED[-1]]
    bent = [b["output_ids"] for job, b in zip(jobs, right, strict=True) if b and job.params == PENALISED[0]]
    assert plain != bent, "the penalties changed nothing, so nothing was tested"


def test_a_prefill_gives_the_logits_of_a_verification(served: Served) -> None:
    """Bit by bit, whether a token comes first or later."""
    params = greedy(max_new_tokens=6)
    (whole,) = run_jobs(served.server, [Job(tuple(PROMPTS[2]), params, extra={"return_logprob": True})])
    assert whole is not None
    later = whole["meta_info"]["output_token_logprobs"]
    for i in range(6):
        prompt = (*PROMPTS[2], *whole["output_ids"][:i])
        (one,) = run_jobs(
            served.server, [Job(prompt, greedy(max_new_tokens=1), extra={"return_logprob": True})]
        )
        assert one is not None and one["meta_info"]["output_token_logprobs"][0][:2] == later[i][:2]


def test_logprobs(served: Served, stock: Server) -> None:
    extra = {
        "return_logprob": True,
        "top_logprobs_num": 4,
        "token_ids_logprob": [3, 50, 400],
        "logprob_start_len": 0,
    }
    wanted: list[dict[str, Any]] = [
        extra,
        {},
        {"return_logprob": True},
        {"return_logprob": True, "top_logprobs_num": 2},
    ]
    jobs = [Job(tuple(p), greedy(max_new_tokens=25), extra=e) for p in PROMPTS for e in wanted]
    for a, b in zip(run_jobs(served.server, jobs), run_jobs(stock, jobs), strict=True):
        assert a is not None and b is not None
        assert a["output_ids"] == b["output_ids"]
        for key in (
            "output_token_logprobs",
            "output_top_logprobs",
            "output_token_ids_logprobs",
            "input_token_logprobs",
        ):
            assert (key in a["meta_info"]) == (key in b["meta_info"])
            if key in a["meta_info"]:
                assert_close(a["meta_info"][key], b["meta_info"][key])


def assert_close(got: Any, right: Any) -> None:
    """Nested lists of [logprob, token, text], in which numbers may differ by TOLERANCE."""
    if isinstance(right, list):
        assert len(got) == len(right), (got, right)
        for a, b in zip(got, right, strict=True):
            assert_close(a, b)
    elif isinstance(right, float):
        assert math.isclose(got, right, abs_tol=TOLERANCE), (got, right)
    else:
        assert got == right


def test_stop_tokens_and_strings(served: Served, stock: Server) -> None:
    jobs = []
    for prompt in PROMPTS:
        free = stock.generate(input_ids=prompt, sampling_params=greedy())
        for place in (1, 6, 7, 20):
            jobs.append(Job(tuple(prompt), greedy(stop_token_ids=[free["output_ids"][place]])))
            jobs.append(Job(tuple(prompt), greedy(stop=free["text"][place : place + 3])))
            jobs.append(Job(tuple(prompt), greedy(stop=free["text"][place : place + 3], no_stop_trim=True)))
            several = [free["text"][p : p + 3] for p in (place + 3, place + 1, place)]
            jobs.append(Job(tuple(prompt), greedy(stop=several)))
    assert_equal_answers(served.server, stock, jobs)


def test_end_of_sequence_inside_a_tree(served: Served, stock: Server) -> None:
    """A biased <eos> ends requests at all depths of their trees; with ignore_eos they go on."""
    jobs = [
        Job((a, b), {"temperature": 0, "max_new_tokens": 40, "logit_bias": {"0": bias}, "ignore_eos": ignore})
        for a in range(20, 30) for b in (40, 41) for bias in (3.0, 6.0) for ignore in (False, True)
    ]  # fmt: skip
    answers = assert_equal_answers(served.server, stock, jobs)
    lengths = {
        a["meta_info"]["completion_tokens"]
        for a in answers
        if a["meta_info"]["finish_reason"]["type"] == "stop"
    }
    assert len(lengths) > 3, "the requests did not end at different places"


def assert_equal_answers(server: Server, stock: Server, jobs: list[Job]) -> list[dict[str, Any]]:
    """Of ``server`` and ``stock``; returns those of ``server``."""
    right, got = run_jobs(stock, jobs), run_jobs(server, jobs)
    for job, a, b in zip(jobs, got, right, strict=True):
        assert a is not None and b is not None
        assert a["output_ids"] == b["output_ids"], job
        assert a["text"] == b["text"], job
        assert a["meta_info"]["finish_reason"] == b["meta_info"]["finish_reason"], job
    return [a for a in got if a is not None]


def second_turn(server: Server, prompt: list[int], stop: str) -> dict[str, Any]:
    """What a session says after a turn that was stopped."""
    session = server.post("/open_session", {"capacity_of_str_len": 1000}).json()
    turn = {"id": session}
    first = server.generate(input_ids=prompt, sampling_params=greedy(stop=stop), session_params=turn)
    turn["rid"] = first["meta_info"]["id"]
    answer: dict[str, Any] = server.generate(
        input_ids=PROMPTS[1], sampling_params=greedy(), session_params=turn
    )
    server.post("/close_session", {"session_id": session})
    return answer


def test_a_session_goes_on_after_its_stop(served: Served, stock: Server) -> None:
    for prompt in PROMPTS:
        free = stock.generate(input_ids=prompt, sampling_params=greedy())
        for place in (3, 8, 15):
            stop = free["text"][place : place + 3]
            right, got = second_turn(stock, prompt, stop), second_turn(served.server, prompt, stop)
            assert got["meta_info"]["prompt_tokens"] == right["meta_info"]["prompt_tokens"], (prompt, stop)
            assert got["output_ids"] == right["output_ids"], (prompt, stop)


def test_several_choices_of_one_prompt(served: Served, stock: Server) -> None:
    body = {"input_ids": PROMPTS[0], "sampling_params": {**greedy(), "n": 4}}
    got, right = served.server.generate(**body), stock.generate(**body)
    assert [a["output_ids"] for a in got] == [b["output_ids"] for b in right]


def streamed_texts(server: Server, stock: Server, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """What has come of each answer, again and again, until it is that of ``stock``."""

    async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
        async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        return [json.loads(line[6:])["text"] for line in lines]

    async def all_streams() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return list(await asyncio.gather(*(stream(client, b) for b in bodies)))

    came = asyncio.run(all_streams())
    for texts, body in zip(came, bodies, strict=True):
        assert all(b.startswith(a.rstrip("\N{REPLACEMENT CHARACTER}")) for a, b in itertools.pairwise(texts))
        assert texts[-1] == stock.generate(**body)["text"]
    return came


def test_streams_add_up_to_the_whole_answer(served: Served, stock: Server) -> None:
    # Long ones: a process that is kept waiting sends only the newest of what it was told.
    bodies = [Job(tuple(p), greedy(max_new_tokens=200)).body for p in PROMPTS]
    came = streamed_texts(served.server, stock, bodies)
    assert min(map(len, came)) > 3, "an answer did not come in pieces"


def test_openai_stream_increments_concatenate(served: Served) -> None:
    body = {"model": "m", "prompt": "the quick", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = served.server.post("/v1/completions", body).json()["choices"][0]["text"]
    parts = []
    with httpx.stream(
        "POST", served.server.url + "/v1/completions", json={**body, "stream": True}, timeout=60
    ) as r:
        for line in r.iter_lines():
            if line.startswith("data:") and "[DONE]" not in line:
                parts += [c["text"] for c in json.loads(line[5:])["choices"]]
    assert "".join(parts) == whole and len(parts) > 2


def test_the_grammar_of_an_aborted_request_harms_nobody(served: Served, stock: Server) -> None:
    long = {"regex": "[a-z]{200}", "max_new_tokens": 200, "temperature": 0}
    leaving = [Job((9, i), long, disconnect_after=2) for i in range(4)]
    staying = [Job(tuple(p), greedy()) for p in PROMPTS]
    got = run_jobs(served.server, [*leaving, *staying])[len(leaving) :]
    for a, b in zip(got, run_jobs(stock, staying), strict=True):
        assert a is not None and b is not None and a["output_ids"] == b["output_ids"]
    served.server.assert_idle_and_clean()


@pytest.mark.parametrize("abort_all", [False, True])
def test_aborts_free_everything(served: Served, abort_all: bool) -> None:
    """Requests are aborted while queued, while their prompt is prefilled in chunks, and while decoding."""
    jobs = [
        Job(
            tuple(range(2, 22 + 8 * (i % 15))), greedy(max_new_tokens=90), arrival_s=0.01 * i,
            disconnect_after=1 + i % 3,
        )
        for i in range(40)
    ]  # fmt: skip
    run_jobs(served.server, jobs)
    if abort_all:
        served.server.post("/abort_request", {"rid": "", "abort_all": True})
    served.server.assert_idle_and_clean()
    answer = served.server.generate(input_ids=PROMPTS[0], sampling_params=greedy(max_new_tokens=5))
    assert len(answer["output_ids"]) == 5

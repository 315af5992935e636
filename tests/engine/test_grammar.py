"""Structured output is drafted, and says what it says without speculation."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.chi_square import two_sample_p
from tests.engine.conftest import Served
from tests.engine.harness import Job, Server, run_jobs
from tests.engine.test_features import PROMPTS, assert_equal_answers, greedy, streamed_texts
from tests.engine.test_sampling import SMALLEST_P, SUSPICIOUS_P

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "items": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["name", "count", "ok", "items"],
    "additionalProperties": False,
}
CALL = {"begin": "<call>", "schema": {**SCHEMA, "required": ["name"]}, "end": "</call>"}
GRAMMARS: dict[str, dict[str, str]] = {
    "json": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"(yes|no|maybe), [0-9]{2,4}\.( the [a-z]{3,9}){2}"},
    "ebnf": {"ebnf": 'root ::= "a" | "b" root | "{" root "}"'},
    "tool": {
        "structural_tag": json.dumps({"structures": [CALL], "triggers": ["<call>"], "at_least_one": True})
    },
}
BESIDES: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"44": 6.0, "210": -8.0, "7": 2.5}},
    {"min_new_tokens": 9},
    {"stop": ["dog", "7", "th"]},
]


def job(prompt: list[int], **params: Any) -> Job:
    return Job(tuple(prompt), greedy(**{"ignore_eos": False, "max_new_tokens": 60, **params}))


def tokens_per_verification(answers: list[dict[str, Any]]) -> float:
    infos = [a["meta_info"] for a in answers]
    decoded = sum(m["completion_tokens"] - 1 for m in infos)
    return decoded / sum(m.get("spec_verify_ct", 0) for m in infos if m["completion_tokens"] > 1)


def assert_valid(job: Job, answer: dict[str, Any]) -> bool:
    """Whether the answer was finished; if so it is valid."""
    if answer["meta_info"]["finish_reason"]["type"] != "stop" or "stop" in job.params:
        return False
    if "regex" in job.params:
        assert re.fullmatch(job.params["regex"], answer["text"]), answer
    elif "ebnf" in job.params:
        assert re.fullmatch(r"[b{]*a\}*", answer["text"]), answer
    elif "json_schema" in job.params:
        assert set(json.loads(answer["text"])) == set(SCHEMA["required"])
    else:
        assert re.match(r"<call>\{.*\}</call>", answer["text"], re.DOTALL), answer
    return True


FORCING = {
    "type": "object",
    "properties": {"ZQJ_WVK_BZQ_日本": {"type": "boolean"}, "YXZ_KJQ_VWB_東京": {"type": "boolean"}},
    "required": ["ZQJ_WVK_BZQ_日本", "YXZ_KJQ_VWB_東京"],
    "additionalProperties": False,
}
"""With keys that the tokenizer of the tests can write in one way only, since the model of the tests writes
at random."""


def forced_counts(server: Server, stock: Server) -> list[dict[str, int]]:
    """Of requests whose text is that of plain decoding: what was forced, and in how many verifications."""
    jobs = [job(p, json_schema=json.dumps(FORCING), max_new_tokens=90) for p in PROMPTS]
    counts = []
    for got, right in zip(run_jobs(server, jobs), run_jobs(stock, jobs), strict=True):
        assert got is not None and right is not None
        assert got["output_ids"] == right["output_ids"]
        info = got["meta_info"]
        tokens = {"tokens": info["completion_tokens"] - 1, "verifications": info["spec_verify_ct"]}
        counts.append(tokens | info["slo"]["drafts"]["forced"])
    return counts


def test_what_is_forced_is_accepted_without_a_draft_model(retrieving: Served, stock: Server) -> None:
    for count in forced_counts(retrieving.server, stock):
        assert count["proposed"] == count["verified"] and count["accepted"] >= 14
        assert count["accepted"] >= 0.75 * count["verified"], "most of it can be written in one way only"
        assert count["tokens"] >= count["verifications"] + count["accepted"]
    plain = retrieving.server.generate(input_ids=PROMPTS[0], sampling_params=greedy())
    assert "forced" not in plain["meta_info"]["slo"]["drafts"]


def test_what_is_forced_is_accepted_beside_a_draft_model(served: Served, stock: Server) -> None:
    """Under all policies in turn, one of which verifies nothing and others what their budget allows."""
    for count in forced_counts(served.server, stock):
        assert count["proposed"] >= count["verified"] >= count["accepted"] >= 5
        assert count["accepted"] >= 0.75 * count["verified"]


def test_greedy_text_is_that_of_plain_decoding(served: Served, stock: Server) -> None:
    """Every kind of grammar, beside every other feature that changes logits or ends, among plain requests."""
    jobs = [
        job(prompt, **grammar, **besides)
        for prompt, besides in itertools.product(PROMPTS, BESIDES)
        for grammar in GRAMMARS.values()
    ]
    jobs += [job(LONG, **grammar) for grammar in GRAMMARS.values()]
    jobs += [Job(tuple(p), greedy(max_new_tokens=30)) for p in PROMPTS]
    jobs += [Job(tuple(p), greedy(presence_penalty=0.8)) for p in PROMPTS]
    answers = assert_equal_answers(served.server, stock, jobs)
    finished = sum(assert_valid(j, a) for j, a in zip(jobs, answers, strict=True) if j.params.keys() & KEYS)
    assert finished > 40


LONG = list(range(2, 130))
"""A prompt that is prefilled in chunks."""

KEYS = {"json_schema", "regex", "ebnf", "structural_tag"}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_copy_of_the_target_accepts_everything(copied: Served, stock: Server, kind: str) -> None:
    """A draft that chooses among allowed tokens, as the target does, is never wrong."""
    jobs = [job(prompt, **GRAMMARS[kind]) for prompt in PROMPTS]
    answers = assert_equal_answers(copied.server, stock, jobs)
    for answer in answers:
        info = answer["meta_info"]
        assert info.get("spec_verify_ct", 0) == -(-(info["completion_tokens"] - 1) // 5), answer
    assert tokens_per_verification(answers) > 2


SHORT = {"regex": r"([a-d]|the|fo|x){3,5}"}
SAMPLES = 1200


def texts(server: Server, samples: int) -> list[str]:
    params = {"temperature": 0.9, "max_new_tokens": 16, **SHORT}
    parts = [
        server.generate(input_ids=[PROMPTS[0]] * (samples // 3), sampling_params=params) for _ in range(3)
    ]
    return [a["text"] for part in parts for a in part]


def test_sampled_text_has_the_distribution_of_plain_decoding(served: Served, stock: Server) -> None:
    def p_values(samples: int) -> list[float]:
        both = [texts(s, samples) for s in (served.server, stock)]
        assert all(re.fullmatch(SHORT["regex"], t) for t in both[0])
        assert len(set(both[0])) > 50, "nearly deterministic: the comparison says nothing"
        places = ((0, 2), (2, 4), (4, 9))
        return [two_sample_p(*[[t[a:b] for t in side] for side in both]) for a, b in places]

    if min(p_values(SAMPLES)) < SUSPICIOUS_P:
        assert min(p_values(2 * SAMPLES)) > SMALLEST_P


def test_the_first_token_may_complete_a_grammar(served: Served) -> None:
    params = greedy(regex="(abc)?", logit_bias={"0": 20.0})
    assert served.server.generate(input_ids=PROMPTS[0], sampling_params=params)["output_ids"] == [0]


AMBIGUOUS: dict[str, Any] = {
    "ebnf": 'root ::= s "."\ns ::= s s | t t | [a-z]\nt ::= s s | t t | [a-z]',
    "logit_bias": {"15": -1000.0},  # the full stop
}
"""Every token takes longer than the one before."""


def test_a_grammar_that_takes_long_ends_its_request_alone(retrieving: Served) -> None:
    jobs = [job(PROMPTS[0], **AMBIGUOUS, max_new_tokens=240), Job((7, 8), greedy(max_new_tokens=200))]
    assert_slow_one_ends(retrieving.server, *jobs)


def assert_slow_one_ends(server: Server, slow: Job, other: Job) -> None:
    with ThreadPoolExecutor() as both:
        ended, whole = both.map(lambda j: server.post("/generate", j.body), (slow, other))
    assert ended.status_code == 400 and "s ::= s s" in ended.text
    assert whole.json()["meta_info"]["completion_tokens"] == 200


def test_several_sampled_choices_are_valid(served: Served) -> None:
    for kind, grammar in GRAMMARS.items():
        params = {"temperature": 1.0, "max_new_tokens": 80, "n": 4, **grammar}
        answers = served.server.generate(input_ids=PROMPTS[1], sampling_params=params)
        finished = [assert_valid(Job((1,), params), a) for a in answers]
        assert len(finished) == 4 and (all(finished) or kind != "regex"), kind


def test_streams_add_up_to_the_whole_answer(served: Served, stock: Server) -> None:
    bodies = [job(p, **g).body for p, g in zip(PROMPTS, GRAMMARS.values(), strict=False)]
    streamed_texts(served.server, stock, bodies)

"""Prefills in chunks, in the forwards of decode iterations or between them: by slack, and under any pattern
of chunk sizes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from adaserve.config import AdaServeConfig
from tests.engine.conftest import EXACT_DRAFT, RESTLESS, TIGHT, TREES, Served, adaserve_server, audited
from tests.engine.harness import Job, Server, Zygote, outputs, run_jobs, whole_texts, workload
from tests.engine.test_features import assert_close
from tests.engine.test_grammar import GRAMMARS
from tests.engine.test_greedy import assert_same

CHUNK = 64  # SGLang's own chunk size in these tests
LONG = 440  # tokens of a prompt that takes many chunks
SLOW_MS = 10.0  # each prefill token takes that long, so LONG takes over 4 seconds
DECODE_MS = 15.0  # more per decode iteration, so that others arrive before the short ones end
SLO_MS = 40.0  # of the requests that decode meanwhile: slack of a second or two, less than LONG takes


# -- by slack -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A target whose prefills are so slow that a long one breaks the SLOs of those who decode."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("slow"),
        pair,
        "noisy",
        TREES,
        {"slow_ms": SLOW_MS, "decode_ms": DECODE_MS, "trace": True},
        **{"context-length": 512, "disable-radix-cache": True},
    )
    with server.running(zygote):
        yield Served("slow", server, probe)
        server.assert_idle_and_clean()
        assert probe.read()["wrong_lengths"] == []


def greedy(tokens: int, slo_ms: float | None = None) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return params | ({"custom_params": {"slo_tpot_ms": slo_ms}} if slo_ms else {})


DECODING = [Job(tuple(range(20 + i, 28 + i)), greedy(240, SLO_MS)) for i in range(2)]
ARRIVING = Job(tuple(2 + (7 * i) % 500 for i in range(LONG)), greedy(12))
URGENT = Job(tuple(range(40, 60)), greedy(1))  # only its first token is due early
AFTER = Job(tuple(range(100, 162)), greedy(1))


@pytest.fixture(scope="module")
def alone(slow: Served) -> list[list[int] | None]:
    """The texts of ``ARRIVING``, ``URGENT`` and ``AFTER``."""
    return outputs(run_jobs(slow.server, (ARRIVING, URGENT, AFTER)))


@pytest.fixture(scope="module")
def right(stock: Server, alone: list[list[int] | None]) -> list[list[int] | None]:
    """What those of a ``Meeting`` say."""
    return [*outputs(run_jobs(stock, DECODING)), alone[0]]


class Meeting:
    """Two requests decode; when both have tokens, a long prompt arrives."""

    def __init__(self, served: Served) -> None:
        self.server, self.probe = served.server, served.probe
        self.answers: list[list[int]] = []

    def run(self, abort_when: Any = None) -> list[int]:
        """The forwards from the arrival on; ``abort_when(forwards)`` says when the prompt is taken back."""
        before = len(self.probe.read()["forwards"])
        self.answers = asyncio.run(self._run(abort_when, before))
        return list(self.probe.read()["forwards"][before:])

    async def _run(self, abort_when: Any, before: int) -> list[list[int]]:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as client:
            started = [asyncio.Event() for _ in DECODING]
            streams = [
                asyncio.create_task(self._stream(client, j, e))
                for j, e in zip(DECODING, started, strict=True)
            ]
            for event in started:
                await event.wait()
            late = asyncio.create_task(client.post("/generate", json={**ARRIVING.body, "rid": "late"}))
            while abort_when is not None and not abort_when(self.probe.read()["forwards"][before:]):
                assert not late.done(), "the prompt was through before it could be aborted"
                await asyncio.sleep(0.01)
            if abort_when is not None:
                await client.post("/abort_request", json={"rid": "late"})
            answer = (await late).json()
            return [*(await asyncio.gather(*streams)), answer.get("output_ids", [])]

    async def _stream(self, client: httpx.AsyncClient, job: Job, started: asyncio.Event) -> list[int]:
        seen: list[int] = []
        async with client.stream("POST", "/generate", json={**job.body, "stream": True}) as lines:
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    seen = json.loads(line[6:])["output_ids"]
                    if len(seen) > 2:
                        started.set()
        return seen


def chunks(forwards: list[int]) -> list[int]:
    """Positions of the long prompt's chunks: the prefills after the two short ones."""
    return [i for i, n in enumerate(forwards) if n > 0][-len(long_sizes(forwards)) :]


def long_sizes(forwards: list[int]) -> list[int]:
    """Its chunk sizes: the last prefills that add up to it."""
    sizes: list[int] = []
    for n in reversed([n for n in forwards if n > 0]):
        if sum(sizes) >= LONG:
            break
        sizes.append(n)
    return sizes[::-1]


def prefill_mode(server: Server, mode: str) -> None:
    answer = server.post("/set_internal_state", {"server_args": {f"adaserve_prefill={mode}": 1}})
    assert answer.status_code == 200, answer.text


def test_a_long_prompt_is_interleaved_by_slack(slow: Served, right: list[list[int] | None]) -> None:
    meeting = Meeting(slow)
    prefill_mode(slow.server, "exclusive")
    exclusive = meeting.run()
    assert meeting.answers == right
    prefill_mode(slow.server, "default")
    before = met(slow.server)
    paced = meeting.run()
    assert meeting.answers == right, "chunking changed an output"
    assert met(slow.server) - before > 3, "no chunk was in the forward of a verification"
    assert sum(long_sizes(exclusive)) == sum(long_sizes(paced)) == LONG
    at = chunks(exclusive)
    assert at == list(range(at[0], at[0] + len(at))), "SGLang itself interleaves now: nothing to compare with"
    at = chunks(paced)
    gaps = [b - a - 1 for a, b in itertools.pairwise(at)]
    assert sum(g > 0 for g in gaps) >= 3, f"decoding stood still during the prefill: {paced}"
    most = AdaServeConfig().prefill_interval
    assert max(gaps) <= most, f"a waiting prompt got no chunk for more than {most} iterations: {gaps}"


@pytest.mark.parametrize("decoding", [False, True])
def test_a_short_prompt_passes_a_long_one_that_has_begun(
    slow: Served, alone: list[list[int] | None], decoding: bool
) -> None:
    """Where it is due earlier; both texts are those that they have alone."""
    # Later than the chunk that runs ends (0.6 s), or it would be given up; sooner than the long one (4 s).
    jobs, ttft_ms = (ARRIVING, URGENT), (60_000, 2500)

    async def meet() -> tuple[list[str], list[list[int]], int, list[int]]:
        done: list[str] = []
        async with httpx.AsyncClient(base_url=slow.server.url, timeout=120) as client:

            async def ask(job: Job, name: str, ttft: int) -> list[int]:
                params = job.body["sampling_params"] | {"custom_params": {"slo_ttft_ms": ttft}}
                answer = await client.post("/generate", json={**job.body, "sampling_params": params})
                done.append(name)
                return list(answer.raise_for_status().json()["output_ids"])

            before = len(slow.probe.read()["forwards"])

            def forwards() -> list[int]:
                return list(slow.probe.read()["forwards"][before:])

            others = DECODING * decoding
            running = [asyncio.create_task(client.post("/generate", json=job.body)) for job in others]
            while sum(forwards()) < sum(len(job.input_ids) for job in others):
                assert not any(one.done() for one in running), "they ended before the long one came"
                await asyncio.sleep(0.01)
            before += len(forwards())
            long = asyncio.create_task(ask(jobs[0], "long", ttft_ms[0]))
            while not sum(forwards()):  # its first chunk
                assert not long.done(), "its prompt was not read in chunks"
                await asyncio.sleep(0.01)
            passed = await ask(jobs[1], "urgent", ttft_ms[1])
            read = sum(forwards())
            answers = await asyncio.gather(long, *running)
            return done, [answers[0], passed], read, forwards()

    done, answers, read, forwards = asyncio.run(meet())
    assert answers == alone[:2], "another text"
    assert done == ["urgent", "long"]
    assert read < LONG, "it came with the long one's last chunk"
    prefills = [i for i, n in enumerate(forwards) if n > 0]
    assert (0 in forwards[prefills[0] : prefills[-1]]) == decoding, forwards


def test_a_prompt_that_passes_and_is_cached_leaves_its_place_to_nobody(
    zygote: Zygote, pair: Path, alone: list[list[int] | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It needs one token of the twenty that it was given. Who comes next does not fit into the others."""
    server, probe = adaserve_server(
        tmp_path_factory.mktemp("cached"),
        pair,
        "noisy",
        TREES,
        {"slow_ms": SLOW_MS, "trace": True},
        **{"context-length": 512},
    )

    def due(job: Job, ttft_ms: int) -> Job:
        return replace(job, params=job.params | {"custom_params": {"slo_ttft_ms": ttft_ms}})

    # All of them are in time, so that only the order in which they are due counts.
    long, urgent, after = due(ARRIVING, 60_000), due(URGENT, 20_000), due(AFTER, 30_000)

    def ask(client: httpx.AsyncClient, *jobs: Job) -> asyncio.Task[httpx.Response]:
        """One request with a prompt or several, which arrive together."""
        body = {"input_ids": [job.input_ids for job in jobs], "sampling_params": [job.params for job in jobs]}
        return asyncio.create_task(client.post("/generate", json=body))

    async def meet() -> tuple[list[list[int]], list[int]]:
        """The texts, and the forwards until the two that pass have ended."""
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await ask(client, urgent)
            before = len(probe.read()["forwards"])

            def forwards() -> list[int]:
                return list(probe.read()["forwards"][before:])

            started = ask(client, long)
            while CHUNK not in forwards():
                assert not started.done(), "its prompt was not read in chunks"
                await asyncio.sleep(0.01)
            two = (await ask(client, urgent, after)).raise_for_status().json()
            met = forwards()
            answers = [*(await started).raise_for_status().json(), *two]
            return [answer["output_ids"] for answer in answers], met

    with server.running(zygote):
        got, met = asyncio.run(meet())
        server.assert_idle_and_clean()
    assert got == alone
    assert CHUNK - len(urgent.input_ids) + 1 in met, f"it was not given more than it needed: {met}"
    assert sum(met) < LONG, "they came with the long one's last chunk"


def test_requests_that_end_in_their_prefill_are_not_kept(slow: Served) -> None:
    """SGLang reports ends where it looks at a decode iteration."""
    jobs = [Job(tuple(range(30 + i, 33 + i)), greedy(1)) for i in range(6)]
    run_jobs(slow.server, jobs[:5])
    run_jobs(slow.server, jobs[5:])  # who is left of a batch is seen at the next end
    wait_until_idle(slow.server)  # answers go out before the worker hears of it
    assert slow.probe.read()["unfinished"] == []


def test_nobody_decodes_nobody_to_spare(slow: Served) -> None:
    """Alone, a prompt takes the fewest chunks that SGLang allows."""
    before = len(slow.probe.read()["forwards"])
    slow.server.generate(**ARRIVING.body)
    forwards = slow.probe.read()["forwards"][before:]
    assert forwards[:7] == [CHUNK] * 6 + [LONG - 6 * CHUNK]


def test_an_aborted_half_prefilled_prompt_frees_its_slots(slow: Served) -> None:
    meeting = Meeting(slow)
    meeting.run()
    right = meeting.answers
    short = sum(len(j.input_ids) for j in DECODING)

    def half_done(forwards: list[int]) -> bool:
        return sum(forwards) >= short + CHUNK

    forwards = meeting.run(abort_when=half_done)
    assert short + CHUNK <= sum(forwards) < short + LONG, "the abort came before or after the prefill"
    assert meeting.answers[:2] == right[:2]
    assert meeting.answers[2] == []
    assert "late" not in slow.probe.read()["unfinished"], "the worker takes it for running"
    wait_until_idle(slow.server)
    slow.server.assert_idle_and_clean()
    meeting.run()
    assert meeting.answers == right, "the next ones got dirty slots"


def wait_until_idle(server: Server) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if server.post("/flush_cache").status_code == 200:
            return
        time.sleep(0.1)


# -- under any pattern of chunk sizes -------------------------------------------------------


SIZES = [64, 5, 0, 64, 16, 1, 0, 0, 64, 33]


@pytest.fixture(scope="module", params=["sync", "overlap"])
def erratic(
    request: pytest.FixtureRequest, zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Chunks of 1 to 64 tokens with up to two decode iterations between them, and little KV."""
    name = f"erratic-{request.param}"
    server, probe = adaserve_server(
        tmp_path_factory.mktemp(name),
        pair,
        "noisy",
        {**TREES, **EXACT_DRAFT},
        {**RESTLESS, "trace": True, "prefill_sizes": SIZES},
        overlap=request.param == "overlap",
        **TIGHT,
    )
    yield from audited(zygote, name, server, probe)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """With disconnects, shared prefixes, and prompts of up to 110 tokens."""
    return workload(110, seed=8, leave_every=11, spread_s=2.0)


@pytest.fixture(scope="module")
def expected(stock: Server, jobs: list[Job]) -> list[list[int]]:
    return whole_texts(stock, jobs)


def test_any_pattern_of_chunks_leaves_the_output_alone(
    erratic: Served, pair: Path, jobs: list[Job], expected: list[list[int]]
) -> None:
    """Retractions, disconnects, shared prefixes, and prompts in pieces."""
    answers = run_jobs(erratic.server, jobs)
    assert_same(pair, jobs, answers, expected)
    finished = [a["meta_info"] for a in answers if a is not None]
    assert len(finished) == 100
    assert sum(m["num_retractions"] for m in finished) > 2, "too few retractions"
    assert any(m["cached_tokens"] > 0 for m in finished), "no prefix was shared"
    assert met(erratic.server) > 20, "hardly any prompt was in the forward of a verification"
    sizes = [n for n in erratic.probe.read()["forwards"] if n > 0]
    assert sum(n == 1 for n in sizes) > 5 and sum(n == 5 for n in sizes) > 5, "the chunks were not cut up"
    wait_until_idle(erratic.server)
    erratic.server.assert_idle_and_clean()


# -- in forwards of their own, and with verification ------------------------------------------


def met(server: Server) -> float:
    """Verifications that had prompts in their forwards."""
    return float(server.internal_state()["adaserve"]["times"]["mixed"])


def many_kinds() -> list[Job]:
    """Requests that come while others decode, and ask for whatever SGLang makes of a prefill's logits."""
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
        ({"frequency_penalty": 0.7, "min_new_tokens": 9, "ignore_eos": False}, {}),
        (GRAMMARS["json"] | {"ignore_eos": False}, {"return_logprob": True}),
        (GRAMMARS["regex"] | {"ignore_eos": False}, {}),
        ({"stop": ["e", "th"], "no_stop_trim": True}, {}),
        ({"max_new_tokens": 1}, {"return_logprob": True, "logprob_start_len": 5}),
    ]
    jobs = []
    for i, base in enumerate(workload(48, seed=3, max_new=40, spread_s=1.5)):
        params, extra = asked[i % len(asked)]
        whole = greedy(30) | params
        jobs.append(replace(base, input_ids=(*base.input_ids, *range(2, 9)), params=whole, extra=extra))
    return jobs


def test_it_is_the_same_text_and_logprobs_in_every_mode(erratic: Served, stock: Server) -> None:
    """A running server goes from one mode to the other. Chunks, retractions and prompts come as before."""
    jobs, server = many_kinds(), erratic.server
    right = run_jobs(stock, jobs)
    for mode in ("mixed", "slack", "mixed", "exclusive"):
        prefill_mode(server, mode)
        before = met(server)
        for job, got, expected in zip(jobs, run_jobs(server, jobs), right, strict=True):
            assert got is not None and expected is not None
            assert got["output_ids"] == expected["output_ids"], (mode, job)
            for key in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
                assert_close(got["meta_info"].get(key), expected["meta_info"].get(key))
        assert (met(server) - before > 5) == (mode == "mixed"), mode
    prefill_mode(server, "default")
    wait_until_idle(server)
    server.assert_idle_and_clean()

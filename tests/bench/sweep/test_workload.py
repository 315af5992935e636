"""The requests of a point: numbers, shares, lengths, times, and what neighbors have in common."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from adaserve.bench.sweep.kinds import MAX_CONTEXT
from adaserve.bench.sweep.plan import Point, SweepError
from adaserve.bench.sweep.prompts import ClassPrompt, PromptPool, cut_to, screened_pool
from adaserve.bench.sweep.ttft import PrefillTime
from adaserve.bench.sweep.workload import Workload, block_of, build_rows, seconds_of_work
from adaserve.pair.prompts import distinct_share
from adaserve.slo.classes import SLOClass, SLOConfig
from adaserve.slo.trace import Trace, TraceRow

POOL = PromptPool(
    tuple(
        ClassPrompt(c, f"{c} {n}", n)
        for c in ("coding", "chat", "summarization", "fast")
        for n in range(5, 300, 5)
    )
)
BASE = Point(0.5)


def rows(
    workload: Workload, point: Point = BASE, seed: int = 0, rate: float = 4.0, seconds: float = 50.0
) -> list[TraceRow]:
    return list(build_rows(workload, POOL, point, rate, seconds, seed, "coding"))


def counts(found: list[TraceRow]) -> Counter[str]:
    return Counter(r.slo_class or "" for r in found)


def test_numbers_and_shares_are_exact() -> None:
    assert counts(rows(Workload())) == {"coding": 120, "chat": 40, "summarization": 40}
    for share in (0.3, 0.9):
        found = counts(rows(Workload(), Point(0.5, urgent=share)))
        assert found["coding"] == 200 * share and found["chat"] == found["summarization"]


def test_the_same_seed_gives_the_same_requests_and_another_one_does_not() -> None:
    assert rows(Workload()) == rows(Workload())
    assert rows(Workload()) != rows(Workload(), seed=1)


def test_arrivals_are_sorted_and_inside_the_run() -> None:
    for point in (BASE, Point(0.5, peaks=True)):
        times = [r.arrival_s for r in rows(Workload(), point)]
        assert times == sorted(times) and times[0] >= 0 and times[-1] < 50.0


def test_arrivals_are_poisson() -> None:
    gaps = np.diff([r.arrival_s for r in rows(Workload(), rate=100.0)])
    assert abs(gaps.std() / gaps.mean() - 1.0) < 0.1


def test_neighbors_on_an_axis_differ_by_what_it_changes() -> None:
    base = rows(Workload())
    assert rows(Workload(), Point(0.5, scale=0.8)) == base, "the SLO changes no request"
    shared = rows(Workload(), Point(0.5, urgent=0.9))
    assert [r.arrival_s for r in shared] == [r.arrival_s for r in base]


def test_classes_peak_in_turn() -> None:
    found = rows(Workload(), Point(0.5, peaks=True), rate=40.0)
    for k, name in enumerate(("coding", "chat", "summarization")):
        times = np.array([r.arrival_s for r in found if r.slo_class == name])
        third = np.histogram(times, 3, (0, 50))[0]
        assert third.argmax() == k and third[k] > 0.6 * len(times)


def test_only_the_urgent_slo_is_scaled() -> None:
    assert Workload().slo_ms(BASE, 10.0) == pytest.approx({"coding": 12, "chat": 50 / 3, "summarization": 50})
    scaled = Workload().slo_ms(Point(0.5, scale=0.6), 10.0)
    assert scaled == pytest.approx({"coding": 6, "chat": 50 / 3, "summarization": 50})


def test_other_classes_and_slos() -> None:
    slos = SLOConfig(
        classes={
            "slow": SLOClass(name="slow", tpot_ms=90),
            "fast": SLOClass(name="fast", tpot_ms=9),
            "any": SLOClass(name="any"),
        }
    )
    workload = Workload(slos)
    assert workload.urgent(0.010) == "fast"
    assert workload.slo_ms(Point(0.5, scale=1.5), 10.0) == {"slow": 90, "fast": 15, "any": None}
    assert workload.mix("fast", 0.5) == {"fast": 0.5, "slow": 0.25, "any": 0.25}


def trace(n: int = 400, names: tuple[str | None, ...] = ("coding", "chat", "summarization")) -> Trace:
    rng = np.random.default_rng(7)
    at = np.cumsum(rng.exponential(0.3, n)) + 100.0
    length = {"coding": 120, "chat": 40, "summarization": 800, None: 400}
    return Trace(
        tuple(
            TraceRow(
                float(t),
                length[names[i % len(names)]],
                256,
                slo_class=names[i % len(names)],
                slo_tpot_ms=50.0,
            )
            for i, t in enumerate(at)
        )
    )


QUARTER = {"prompt_scale": 0.25, "output_scale": 0.25}


def test_a_trace_gives_arrivals_classes_and_lengths_at_the_rate_of_the_host() -> None:
    source = trace()
    found = rows(Workload(trace=source, **QUARTER))
    assert len(found) == 200 and found[-1].arrival_s < 50.0
    assert [r.slo_class for r in found] == [r.slo_class for r in source.rows[:200]]
    gaps = np.diff([r.arrival_s for r in found])
    want = np.diff([r.arrival_s for r in source.rows[:200]])
    assert np.allclose(gaps / want, gaps[0] / want[0], rtol=1e-2), "gaps keep their proportions"
    assert {r.output_tokens for r in found} == {64}
    assert {r.prompt_tokens for r in found if r.slo_class == "summarization"} <= set(range(180, 221))
    assert all(r.slo_tpot_ms is None for r in found), "SLOs come from the classes, not from the file"


def test_seeds_take_other_parts_of_a_trace() -> None:
    source = trace()
    classes = [r.slo_class for r in rows(Workload(trace=source), seed=1)]
    assert classes == [r.slo_class for r in source.rows[200:]]


def test_a_longer_run_than_the_trace_goes_round() -> None:
    found = rows(Workload(trace=trace(50)), rate=10.0)
    assert len(found) == 500
    assert np.diff([r.arrival_s for r in found]).max() < 5.0


def test_classes_of_a_trace_can_be_shared_out_anew_with_lengths_of_their_own() -> None:
    found = rows(Workload(trace=trace(), **QUARTER), Point(0.5, urgent=0.9))
    assert counts(found)["coding"] == 180
    assert {r.prompt_tokens for r in found if r.slo_class == "coding"} <= set(range(10, 56))


def test_a_trace_without_classes_gets_the_papers() -> None:
    found = rows(Workload(trace=trace(names=(None,)), **QUARTER))
    assert counts(found) == {"coding": 120, "chat": 40, "summarization": 40}
    assert {r.output_tokens for r in found} == {64}


def test_rows_of_a_trace_that_name_a_class_keep_it_where_others_name_none() -> None:
    found = rows(Workload(trace=trace(names=("chat", None))))
    assert [r.slo_class for r in found[::2]] == ["chat"] * 100
    assert counts(found)["coding"] > 40, "the others get the paper's shares"


def test_no_request_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SweepError, match="--seconds"):
        rows(Workload(), rate=0.01, seconds=2.0)


def test_a_prompt_of_about_the_length_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    for want in (10, 100, 290, 5000):
        _, tokens = POOL.pick("coding", want, rng)
        assert abs(tokens - min(want, 295)) <= 30
    with pytest.raises(SweepError, match="poems"):
        POOL.pick("poems", 10, rng)


def test_prompts_are_cut_at_their_beginning_where_a_line_begins() -> None:
    text = "\n".join(f"line {k} of a longer text that goes on" for k in range(100))
    cut = cut_to([(text, 900)], 90)
    assert text.endswith(cut) and cut.startswith("line ") and 0.05 < len(cut) / len(text) < 0.13
    assert cut_to([("short", 3), ("other", 3)], 6) == "other\n\nshort"
    assert cut_to([("exactly so", 30)], 29) == "exactly so"


def test_looping_continuations_are_noticed() -> None:
    assert distinct_share(list(range(64))) == 1.0
    assert distinct_share([1, 2, 3] * 20) < 0.1
    assert distinct_share([1, 1]) == 1.0


def test_only_prompts_that_do_not_loop_are_kept_while_there_are_enough(tmp_path: Path) -> None:
    def proceed(texts, temperature, tokens):  # type: ignore[no-untyped-def]
        # Prompts whose length can be divided by four loop.
        return [(len(t) // 4, [1] * tokens if len(t) % 4 == 0 else list(range(tokens))) for t in texts]

    pool, shares = screened_pool(Workload(), "coding", proceed)
    assert all(len(p.text) % 4 for p in pool.prompts)
    assert all(0.5 <= shares[name] < 0.95 for name in Workload().names)
    pool.save(tmp_path / "prompts.jsonl")
    assert PromptPool.load(tmp_path / "prompts.jsonl") == pool
    odd = PromptPool((ClassPrompt("chat", "a line\u2028and\x85another", 5),))
    odd.save(tmp_path / "prompts.jsonl")
    assert PromptPool.load(tmp_path / "prompts.jsonl") == odd, "JSON lets these stand in a text"

    everything_loops = screened_pool(Workload(), "coding", lambda ts, _, n: [(9, [1] * n) for _ in ts])[0]
    half = {"coding": 48, "chat": 24, "summarization": 24}
    found = Counter(p.category for p in everything_loops.prompts)
    assert all(0.8 * half[name] <= found[name] <= half[name] for name in half), "some candidates are equal"


def test_conversations_grow_turn_by_turn_and_stay_within_the_context() -> None:
    found = rows(Workload(), Point(0.5, kind="sessions"))
    by_session: dict[str, list[TraceRow]] = {}
    for row in found:
        by_session.setdefault(str(row.session_id), []).append(row)
    assert max(map(len, by_session.values())) == 3 and len(found) == len(rows(Workload()))
    for turns in by_session.values():
        assert len({t.slo_class for t in turns}) == 1
        for earlier, later in pairwise(turns):
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert later.arrival_s >= earlier.arrival_s
        assert turns[-1].prompt_tokens + turns[-1].output_tokens <= MAX_CONTEXT


def test_a_conversation_ends_with_its_block() -> None:
    """The next block is played on a server that has not seen it: its turn would come without what was said,
    and with the TTFT SLO of all of it."""
    point, blocks = Point(0.5, kind="sessions"), 5
    found = build_rows(Workload(), POOL, point, 4.0, 50.0, 0, "coding", blocks)
    own = rows(Workload())
    assert [r.text for r in found] == [r.text for r in own]
    alone = {r.text: r.prompt_tokens for r in own}
    for k in range(blocks):
        begun: set[str | None] = set()
        for row in block_of(found, k, 50.0 / blocks):
            if row.session_id not in begun:
                assert row.prompt_tokens == alone[row.text]
            begun.add(row.session_id)
        assert len(begun) > 10


def test_long_prompts_are_long_and_end_with_the_requests_own_text() -> None:
    plain, found = rows(Workload()), rows(Workload(), Point(0.5, kind="long"))
    tokens = [r.prompt_tokens for r in found]
    assert min(tokens) >= 512 and np.median(tokens) == pytest.approx(800, rel=0.15)
    assert all((a.text or "").endswith(b.text or "-") for a, b in zip(found, plain, strict=True))


def test_repetition_says_things_twice() -> None:
    found = rows(Workload(), Point(0.5, kind="repetition"))
    edits = [r for r in found if r.slo_class == "coding"]
    assert all("# before" in (r.text or "") and "# after" in (r.text or "") for r in edits)
    assert all("User:" in (r.text or "") for r in found if r.slo_class == "chat")
    assert len({r.text for r in found}) > 0.8 * len(found), "not one prompt over and over"


def test_blocks_cut_the_run_and_lose_nobody() -> None:
    found = rows(Workload())
    blocks = [block_of(found, k, 10.0) for k in range(5)]
    assert [r.text for b in blocks for r in b] == [r.text for r in found]
    assert all(0 <= r.arrival_s < 10 for b in blocks for r in b)
    with pytest.raises(SweepError, match="block 5"):
        block_of(found, 5, 10.0)


def test_work_counts_prompts_and_outputs() -> None:
    two = [TraceRow(0.0, 100, 10), TraceRow(0.0, 300, 30)]
    assert seconds_of_work(two, PrefillTime(50.0, 1.0), 0.02) == pytest.approx(0.05 + 0.2 + 20 * 0.02)


def test_what_a_conversation_has_said_before_is_no_work() -> None:
    """The server has it in its prefix cache, so turns are as much work as requests of their own."""
    turns, alone = rows(Workload(), Point(0.5, kind="sessions")), rows(Workload())
    assert sum(r.prompt_tokens for r in turns) > 2 * sum(r.prompt_tokens for r in alone)
    work = [seconds_of_work(found, PrefillTime(50.0, 1.0), 0.02) for found in (turns, alone)]
    assert work[0] == pytest.approx(work[1])

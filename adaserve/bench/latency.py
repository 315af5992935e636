"""``adaserve bench latency``: TPOT of policies against plain decoding, interleaved on one server.

One server runs all policies in turn, batch by batch, so that a machine that slows down slows all of
them. A batch is one ``/generate`` call with n held-out prompts; its TPOT is the mean over its
requests of the server's own decode time per token.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from adaserve.server import Server, ServerError

BASE = "none"
SCREENED = 128
"""Prompts tried per temperature."""
DISTINCT = 0.9
"""Share of an output's 8-grams that must be distinct for it not to count as a loop."""


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """What to measure."""

    policies: tuple[str, ...] = ("adaserve",)
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    rounds: int = 5
    tokens: int = 64
    seed: int = 0

    @property
    def steps(self) -> int:
        """Batches that will be sent, and one choice of prompts per temperature."""
        per_temperature = len(self.batches) * self.rounds * (1 + len(self.policies))
        return len(self.temperatures) * (1 + per_temperature)


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch under one policy."""

    policy: str
    batch: int
    temperature: float
    round: int
    tpot_ms: float  # mean over the requests
    accept_length: float  # tokens per request and iteration, bonus included
    distinct_8grams: float  # share of the output's 8-grams that occur once; low = the text loops
    iteration_ms: float
    target_ms: float  # per iteration, in the target's forward
    draft_ms: float  # per iteration, in the draft's forwards
    python_share: float  # of the worker's iteration that is in neither model
    loop_ms: float  # from the end of one iteration to the end of the next: SGLang's own work included
    other_share: float  # of that time that is in neither model


def run(server: Server, plan: LatencyPlan, done: Callable[[str], None]) -> list[Sample]:
    """Measures everything in ``plan``; ``done`` is told after each batch."""
    samples = []
    for temperature in plan.temperatures:
        prompts = _prompts_that_do_not_loop(server, plan, temperature)
        done(f"T={temperature:g}: {len(prompts)} prompts whose output does not loop")
        for batch in plan.batches:
            for turn in range(plan.rounds):
                texts = [prompts[(turn * 37 + i) % len(prompts)] for i in range(batch)]
                _prefill(server, plan, texts)
                for policy in (BASE, *plan.policies):
                    samples.append(_measure(server, policy, texts, temperature, turn, plan.tokens))
                    done(f"batch {batch}, T={temperature:g}, {policy}")
    return samples


def _prompts_that_do_not_loop(server: Server, plan: LatencyPlan, temperature: float) -> list[str]:
    """Held-out code and prose after which plain decoding does not repeat itself: loops inflate acceptance."""
    candidates = _prompts(plan.seed)[:SCREENED]
    server.set_policy(BASE)
    kept = []
    for start in range(0, len(candidates), 32):
        texts = candidates[start : start + 32]
        answers = _generate(server, texts, temperature, plan.tokens)
        kept += [t for t, a in zip(texts, answers, strict=True) if _distinct(a["output_ids"]) >= DISTINCT]
    if len(kept) < 8:
        raise ServerError(
            f"at T={temperature:g} only {len(kept)} of {len(candidates)} prompts are continued without "
            "loops: raise the temperature or lower --tokens"
        )
    return kept


def _prefill(server: Server, plan: LatencyPlan, texts: Sequence[str]) -> None:
    """Puts the prompts into both KV caches, so that what follows is decoding and nothing else."""
    server.set_policy(plan.policies[0] if plan.policies else BASE)
    httpx.post(server.url + "/flush_cache", timeout=30.0)
    _generate(server, texts, 0.0, 1)


def _generate(server: Server, texts: Sequence[str], temperature: float, tokens: int) -> list[dict[str, Any]]:
    params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": list(texts), "sampling_params": params}
    answer = httpx.post(server.url + "/generate", json=body, timeout=600.0).raise_for_status().json()
    return list(answer)


def _prompts(seed: int) -> list[str]:
    """Held-out code and prose of 30 to 300 tokens, shuffled."""
    from adaserve.pair.prompts import load_prompts

    texts = [p.text for p in load_prompts() if p.category != "summarization" and 30 <= p.tokens <= 300]
    random.Random(seed).shuffle(texts)
    return texts


def _measure(
    server: Server, policy: str, texts: Sequence[str], temperature: float, turn: int, tokens: int
) -> Sample:
    server.set_policy(policy)
    before = server.report()["times"]
    answers = _generate(server, texts, temperature, tokens)
    after = server.report()["times"]
    spent = {k: after[k] - before[k] for k in after}
    n = max(1.0, spent["iterations"])
    meta = [a["meta_info"] for a in answers]
    verifications = sum(m["spec_verify_ct"] for m in meta)
    models_s = spent["target_s"] + spent["draft_s"]
    loop_ms = spent["loop_s"] / max(1.0, spent["loops"]) * 1e3
    return Sample(
        policy=policy,
        batch=len(texts),
        temperature=temperature,
        round=turn,
        tpot_ms=statistics.mean(m["slo"]["tpot_ms"] for m in meta),
        accept_length=sum(m["completion_tokens"] - 1 for m in meta) / max(1, verifications),
        distinct_8grams=statistics.mean(_distinct(a["output_ids"]) for a in answers),
        iteration_ms=spent["decode_s"] / n * 1e3,
        target_ms=spent["target_s"] / n * 1e3,
        draft_ms=spent["draft_s"] / n * 1e3,
        python_share=1.0 - models_s / max(spent["decode_s"], 1e-9),
        loop_ms=loop_ms,
        other_share=1.0 - models_s / n * 1e3 / max(loop_ms, 1e-6),
    )


def _distinct(tokens: Sequence[int]) -> float:
    grams = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    return len(set(grams)) / len(grams) if grams else 1.0


def summarize(samples: Sequence[Sample], plan: LatencyPlan) -> list[dict[str, Any]]:
    """One row per (temperature, batch, policy): medians and the speed-up paired round by round."""
    rows = []
    for temperature in plan.temperatures:
        for batch in plan.batches:
            of = [s for s in samples if s.batch == batch and s.temperature == temperature]
            base = {s.round: s.tpot_ms for s in of if s.policy == BASE}
            for policy in (BASE, *plan.policies):
                mine = [s for s in of if s.policy == policy]
                ratios = sorted(base[s.round] / s.tpot_ms for s in mine)
                rows.append(
                    {
                        "temperature": temperature,
                        "batch": batch,
                        "policy": policy,
                        "tpot_ms": statistics.median(s.tpot_ms for s in mine),
                        "speedup": statistics.median(ratios),
                        "speedup_range": [ratios[0], ratios[-1]],
                        **{
                            k: statistics.median(getattr(s, k) for s in mine)
                            for k in (
                                "accept_length",
                                "distinct_8grams",
                                "iteration_ms",
                                "target_ms",
                                "draft_ms",
                                "python_share",
                                "loop_ms",
                                "other_share",
                            )
                        },
                    }
                )
    return rows


def save(
    path: Path, samples: Sequence[Sample], plan: LatencyPlan, server: dict[str, Any], command: str
) -> None:
    """Writes everything that is needed to judge and repeat the measurement."""
    from adaserve.environment import describe_host

    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "schema_version": 1,
        "kind": "bench latency",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "host": describe_host(),
        "plan": asdict(plan),
        "latency_model": server["latency"],
        "summary": summarize(samples, plan),
        "samples": [asdict(s) for s in samples],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")

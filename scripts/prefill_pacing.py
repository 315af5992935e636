"""Prefills by slack against prefills first: TPOT and TTFT of the same traffic, in turns on one server.

python scripts/prefill_pacing.py --rate 1.5 --seconds 30 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adaserve.config import PREFILLS, AdaServeConfig
from adaserve.pair.prompts import load_prompts
from adaserve.server import Server, ServerSpec, free_port

MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}


def schedule(rate: float, seconds: float, tokens: int, seed: int) -> list[tuple[float, dict[str, Any]]]:
    """Poisson arrivals of held-out prompts: (second, body of /generate)."""
    rng = random.Random(seed)
    prompts = {name: [p.text for p in load_prompts() if p.category == name] for name in MIX}
    found, at_s = [], rng.expovariate(rate)
    while at_s < seconds:
        name = rng.choices(list(MIX), list(MIX.values()))[0]
        params = {
            "temperature": 0.7,
            "max_new_tokens": rng.randint(tokens // 2, tokens * 3 // 2),
            "ignore_eos": True,
            "custom_params": {"slo_class": name},
        }
        found.append((at_s, {"text": rng.choice(prompts[name]), "sampling_params": params}))
        at_s += rng.expovariate(rate)
    return found


async def replay(url: str, arrivals: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The SLO report of every request."""

    async def one(client: httpx.AsyncClient, at_s: float, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(at_s)
        answer = (await client.post("/generate", json=body)).raise_for_status().json()
        return dict(answer["meta_info"]["slo"])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, at_s, body) for at_s, body in arrivals)))


def row(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of one set of requests."""
    ttft = sorted(r["ttft_ms"] for r in reports)
    return {
        "requests": len(reports),
        "attained": sum(r["met"] for r in reports) / len(reports),
        "tpot_mean_ms": statistics.mean(r["tpot_ms"] for r in reports),
        "ttft_p50_ms": ttft[len(ttft) // 2],
        "ttft_p95_ms": ttft[int(0.95 * (len(ttft) - 1))],
    }


def measure(args: argparse.Namespace, server: Server, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    task = progress.add_task("measuring", total=args.rounds * len(PREFILLS))
    reports: dict[str, list[dict[str, Any]]] = {mode: [] for mode in PREFILLS}
    asyncio.run(replay(server.url, schedule(4.0, 4.0, 32, 99)))  # both models and the estimates get warm
    for turn in range(args.rounds):
        arrivals = schedule(args.rate, args.seconds, args.tokens, args.seed + turn)
        for mode in PREFILLS if turn % 2 else PREFILLS[::-1]:
            body = {"server_args": {f"adaserve_prefill={mode}": 1}}
            httpx.post(server.url + "/set_internal_state", json=body, timeout=30.0).raise_for_status()
            httpx.post(server.url + "/flush_cache", timeout=30.0).raise_for_status()
            reports[mode] += asyncio.run(replay(server.url, arrivals))
            progress.advance(task)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", default="adaserve")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, per round and mode")
    parser.add_argument("--tokens", type=int, default=64, help="mean output length")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        progress.add_task("the server starts", total=None)
        spec = ServerSpec(port=free_port(), config=AdaServeConfig(policy=args.policy))
        with Server(spec, Path(folder) / "server.log") as server:
            reports = measure(args, server, progress)
    table = Table("class", "prefills", "requests", "attained", "TPOT mean", "TTFT p50", "TTFT p95")
    figures = {}
    for name in (*MIX, "all"):
        for mode, every in reports.items():
            chosen = [r for r in every if name in ("all", r["class"])]
            if not chosen:
                continue
            figures[f"{name}/{mode}"] = f = row(chosen)
            times = (f"{f[k]:.1f}" for k in ("tpot_mean_ms", "ttft_p50_ms", "ttft_p95_ms"))
            table.add_row(name, mode, str(f["requests"]), f"{f['attained']:.0%}", *times)
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "figures": figures}, default=str, indent=1))


if __name__ == "__main__":
    main()

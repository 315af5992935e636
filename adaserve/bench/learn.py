"""``adaserve bench learn``: a draft that learns against the draft as it came, while the traffic shifts.

One server serves every block of requests twice, in turns: with the first draft, and with what was learned so
far from the blocks before. The prompts are the same, and what the learning draft serves is learned from next.
They are cut from files of AdaServe's own libraries, of kinds that the embedded pair was not trained on: C++,
JSON and licences.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from adaserve.bench.client import Ask, send
from adaserve.bench.servers import running
from adaserve.bench.terminal import progress, table
from adaserve.loadgen.figures import color, legend, panels, save
from adaserve.loadgen.results import new_results_dir, provenance
from adaserve.server import ServerError, ServerProcess, ServerSpec

PATTERNS = {
    "cpp": ("torch/include/**/*.h",),
    "json": ("**/*.json",),
    "law": ("**/LICENSE*", "**/licenses/*"),
}
"""Domain -> files below the environment's libraries."""
LEAST_BYTES, MOST_FILES = 2_000, 400
PROMPT_CHARACTERS = (150, 600)
SETTINGS = {"first": "draft as it came", "present": "draft that learns"}


@dataclass(frozen=True, slots=True)
class LearnPlan:
    """``order``: a domain for each part of the stream; a part has ``requests``, in blocks of ``block``."""

    order: tuple[str, ...] = ("cpp", "json", "law", "cpp")
    requests: int = 256
    block: int = 32
    tokens: int = 96
    temperature: float = 0.8
    at_once: int = 4
    seed: int = 0

    @property
    def blocks(self) -> list[tuple[int, str]]:
        """(part, domain) of every block."""
        per_part = max(1, self.requests // self.block)
        return [(part, domain) for part, domain in enumerate(self.order) for _ in range(per_part)]


@dataclass(frozen=True, slots=True)
class Block:
    """The same requests with one of the two drafts."""

    part: int
    domain: str
    draft: str  # "first" or "present"
    tokens: int  # that were served before, over all blocks that are learned from
    accepted: float  # tokens accepted per verification, bonus not counted
    tpot_ms: float  # mean over the requests, of the server's own decode time
    seconds: float  # of the whole block


def run_learn(spec: ServerSpec, plan: LearnPlan, out: Path | None, console: Console) -> None:
    """Starts a server that learns and plays the stream; JSON after every block, a figure at the end.

    Raises ServerError."""
    folder = out or new_results_dir(Path("results"), "learn")
    texts = {domain: Texts(domain, plan.seed) for domain in dict.fromkeys(plan.order)}
    with running(spec, folder / "server.log", console) as server, progress(console) as bar:
        task = bar.add_task("serving", total=len(plan.blocks))
        blocks: list[Block] = []
        for part, domain in plan.blocks:
            asks = [Ask(t, plan.tokens, plan.temperature) for t in texts[domain].take(plan.block)]
            served = len(blocks) // 2 * plan.block * plan.tokens
            order = list(SETTINGS) if len(blocks) % 4 == 0 else list(SETTINGS)[::-1]
            blocks += [_play(server, name, asks, plan, (part, domain, served)) for name in order]
            bar.update(task, advance=1, description=f"{domain}, {blocks[-1].accepted:.2f} accepted")
            learning = server.report()["stats"]["learning"]
            result = {"plan": asdict(plan), "learning": learning, "blocks": [asdict(b) for b in blocks]}
            (folder / "learn.json").write_text(json.dumps({**result, **provenance()}, indent=1) + "\n")
    _draw(blocks, folder / "learn.png")
    Console().print(_table(blocks, plan))
    console.print(f"written to {folder}")


def _play(
    server: ServerProcess, name: str, asks: Sequence[Ask], plan: LearnPlan, at: tuple[int, str, int]
) -> Block:
    server.drain()
    server.set_draft(name)
    replies = send(server.url, asks, plan.at_once)
    decoded = sum(len(r.output_ids) - 1 for r in replies)
    verifications = sum(r.meta["spec_verify_ct"] for r in replies)
    tpots = [r.meta["slo"]["tpot_ms"] for r in replies]
    accepted = decoded / verifications - 1
    return Block(*at[:2], name, at[2], accepted, float(np.mean(tpots)), sum(r.seconds for r in replies))


class Texts:
    """Prompts of one domain, cut from its files."""

    def __init__(self, domain: str, seed: int) -> None:
        """Raises ServerError where there are no such files."""
        torch = find_spec("torch")
        assert torch is not None and torch.origin is not None
        library = Path(torch.origin).parents[1]
        found = sorted(f for pattern in PATTERNS[domain] for f in library.glob(pattern) if _is_text(f))
        if not found:
            raise ServerError(f"there are no files for {domain!r} below {library}: choose other domains")
        self._rng = random.Random(f"{seed} {domain}")
        self._rng.shuffle(found)
        self._texts = [f.read_text(errors="ignore") for f in found[:MOST_FILES]]

    def take(self, count: int) -> list[str]:
        rng, prompts = self._rng, []
        for _ in range(count):
            text = rng.choice(self._texts)
            start, length = rng.randrange(len(text) // 2), rng.randint(*PROMPT_CHARACTERS)
            prompts.append(text[start : start + length])
        return prompts


def _is_text(file: Path) -> bool:
    return file.is_file() and LEAST_BYTES < file.stat().st_size < 2_000_000


def _table(blocks: Sequence[Block], plan: LearnPlan) -> Any:
    """A row for each part of the stream: its last half, when the draft has seen something of it."""
    heads = ("part", "accepted, first", "learning", "gain", "TPOT ms, first", "learning")
    made = table("Accepted tokens per verification, second half of each part", heads, left=heads[:1])
    for part, domain in enumerate(plan.order):
        mine = {n: [b for b in blocks if b.part == part and b.draft == n] for n in SETTINGS}
        late = {n: of[len(of) // 2 :] for n, of in mine.items()}
        accepted, tpot = (
            {n: float(np.mean([getattr(b, what) for b in of])) for n, of in late.items()}
            for what in ("accepted", "tpot_ms")
        )
        cells = (accepted["first"], accepted["present"])
        gain = f"{accepted['present'] / accepted['first'] - 1:+.1%}"
        made.add_row(
            f"{part + 1} {domain}", *(f"{c:.3f}" for c in cells), gain, *(f"{tpot[n]:.1f}" for n in SETTINGS)
        )
    return made


def _draw(blocks: Sequence[Block], path: Path) -> None:
    figure, (ax,) = panels(width=6.4, height=3.4)
    for index, (name, label) in enumerate(SETTINGS.items()):
        mine = [b for b in blocks if b.draft == name]
        ax.plot([b.tokens for b in mine], [b.accepted for b in mine], color=color(index), label=label)
    starts = {b.part: b for b in reversed(blocks)}
    for b in starts.values():
        ax.axvline(b.tokens, color="#8c8c8c", linewidth=0.7)
        ax.text(b.tokens, ax.get_ylim()[1], f" {b.domain}", va="top", fontsize=8)
    ax.set_xlabel("tokens served before")
    ax.set_ylabel("accepted tokens per verification")
    legend(figure, ax)
    save(figure, path)

"""A draft that learns against one that does not, on one server, while the traffic shifts.

The server gets every block of requests twice, in turns. They are numbered alike both times, so both drafts
serve the same texts: what differs is how many tokens are accepted, and the time that takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from adaserve.bench.client import Ask, Reply, send_in_order
from adaserve.bench.display import progress, table
from adaserve.bench.learn.texts import Texts
from adaserve.bench.start_server import running_server
from adaserve.host.files import write_json
from adaserve.loadgen.figures import color, legend, panels, save
from adaserve.loadgen.results import provenance
from adaserve.server import ServerProcess, ServerSpec
from adaserve.slo.run_summary import percent
from adaserve.terminal import say

SETTINGS = {
    "first": "first draft",
    "held": "not learning",
    "present": "learning",
}


@dataclass(frozen=True, slots=True)
class LearnPlan:
    """``order``: the parts of the stream, such as "cpp", "cpp+law" (blocks of two domains in turn) and
    "cpp+law:512" (512 requests in place of ``requests``). They come in blocks of ``block``."""

    order: tuple[str, ...] = ("cpp", "json", "law", "cpp")
    requests: int = 256
    block: int = 32
    tokens: int = 96
    temperature: float = 0.8
    at_once: int = 8
    against: Literal["first", "held"] = "first"  # what the draft that learns is compared with
    every: int = 1  # blocks after which a block is served by both; the others only by the draft that learns
    slo_classes: tuple[str, ...] = ()  # given to the requests in turn
    rest: float = 0.0  # seconds without requests, for each second with them
    seed: int = 0

    @property
    def blocks(self) -> list[tuple[int, str]]:
        """(part, domain) of every block. Raises ValueError for a part without requests."""
        found = []
        for part, words in enumerate(self.order):
            domains, _, number = words.partition(":")
            if (requests := int(number or self.requests)) < 1:
                raise ValueError(f"{requests} requests of {domains}")
            names = domains.split("+")
            blocks = max(1, requests // self.block)
            found += [(part, names[i % len(names)]) for i in range(blocks)]
        return found

    @property
    def settings(self) -> tuple[str, ...]:
        """What blocks are served by."""
        return (self.against, "present")


@dataclass(frozen=True, slots=True)
class Block:
    """The same requests with one of the two drafts."""

    part: int
    domain: str
    draft: str  # of SETTINGS
    tokens: int  # that were served before, over all blocks that are learned from
    accepted: float  # tokens accepted per verification, bonus not counted
    tpot_ms: float  # mean over the requests, of the server's own decode time
    attained: float | None  # share of the requests with an SLO that met it
    same: float  # share of the texts that are the same as with the other draft


def run_learn(spec: ServerSpec, plan: LearnPlan, folder: Path, console: Console) -> None:
    """Starts a server that learns and plays the stream; JSON after every block, a figure at the end.

    Raises ServerError."""
    made, texts = provenance(), {domain: Texts(domain, plan.seed) for _, domain in plan.blocks}
    with running_server(spec, folder / "server.log", console) as server, progress(console) as bar:
        task = bar.add_task("serving", total=len(plan.blocks))
        blocks: list[Block] = []
        for index, (_, domain) in enumerate(plan.blocks):
            classes = cycle(plan.slo_classes or (None,))
            asks = [
                Ask(text, plan.tokens, plan.temperature, slo_class)
                for text, slo_class in zip(texts[domain].take(plan.block), classes, strict=False)
            ]
            blocks += _played(server, asks, plan, index)
            bar.update(task, advance=1, description=f"{domain}, {blocks[-1].accepted:.2f} accepted")
            learning = server.report()["stats"]["learning"]
            result = {"plan": asdict(plan), "learning": learning, "blocks": [asdict(b) for b in blocks]}
            write_json(folder / "learn.json", {**result, **made})
    _draw(blocks, plan, folder / "learn.png")
    Console().print(_table(blocks, plan))
    say(console, f"written to {folder}")


def _played(server: ServerProcess, asks: Sequence[Ask], plan: LearnPlan, index: int) -> list[Block]:
    """Block number ``index`` with both drafts, or with the one that learns alone."""
    turn, rest = divmod(index, plan.every)
    both = rest == 0
    names = plan.settings if both else plan.settings[1:]
    part, domain = plan.blocks[index]
    answers: dict[str, list[Reply]] = {}
    for name in names if turn % 2 else names[::-1]:
        server.drain()
        server.set_draft(name)
        server.number_requests(1 + index * plan.block)
        start_s = time.monotonic()
        answers[name] = send_in_order(server.url, asks, plan.at_once)
        time.sleep(plan.rest * (time.monotonic() - start_s))
    written = {name: [a.output_ids for a in of] for name, of in answers.items()}
    pairs = zip(written[names[0]], written["present"], strict=True)
    same = float(np.mean([one == other for one, other in pairs]))
    served_before = index * plan.block * plan.tokens
    return [_block((part, domain, name, served_before), answers[name], same) for name in names]


def _block(at: tuple[int, str, str, int], answers: Sequence[Reply], same: float) -> Block:
    decoded = sum(len(a.output_ids) - 1 for a in answers)
    accepted = decoded / sum(a.meta["spec_verify_ct"] for a in answers) - 1
    slos = [a.meta["slo"] for a in answers]
    met = [s["met"] for s in slos if s["tpot_slo_ms"] is not None]
    tpot_ms = float(np.mean([s["tpot_ms"] for s in slos]))
    return Block(*at, accepted, tpot_ms, float(np.mean(met)) if met else None, same)


def _table(blocks: Sequence[Block], plan: LearnPlan) -> Any:
    """A row for each part of the stream: its last half, when the draft has seen something of it."""
    settings = [SETTINGS[name] for name in plan.settings]
    heads = ("", *settings, "gain", "TPOT", "attained", "same")
    made = table("Accepted per verification, second half of each part", heads, left=heads[:1])
    for part, domain in enumerate(plan.order):
        mine = {n: [b for b in blocks if b.part == part and b.draft == n] for n in plan.settings}
        paired = {b.tokens for b in mine[plan.against]}
        late = {n: [b for b in of if b.tokens in paired][len(paired) // 2 :] for n, of in mine.items()}
        accepted, tpot, attained, same = (
            {n: _mean([getattr(b, what) for b in of]) for n, of in late.items()}
            for what in ("accepted", "tpot_ms", "attained", "same")
        )
        before, now = plan.settings
        made.add_row(
            f"{part + 1} {domain}",
            *(f"{accepted[n]:.3f}" for n in plan.settings),
            f"{accepted[now] / accepted[before] - 1:+.1%}",
            f"{tpot[now]:.1f} ms ({tpot[now] / tpot[before] - 1:+.1%})",
            "-"
            if np.isnan(attained[now])
            else " -> ".join(f"{percent(attained[n], 0)}%" for n in plan.settings),
            f"{percent(same[now], 0)}%",
        )
    return made


def _mean(values: Sequence[float | None]) -> float:
    """nan without values."""
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else float("nan")


def _draw(blocks: Sequence[Block], plan: LearnPlan, path: Path) -> None:
    """A color for each domain: how much is accepted differs more between domains than between drafts."""
    figure, (ax,) = panels(width=6.4, height=3.4)
    for index, domain in enumerate(dict.fromkeys(b.domain for b in blocks)):
        for name, style in zip(plan.settings, ("o--", "o-"), strict=True):
            mine = [b for b in blocks if (b.domain, b.draft) == (domain, name)]
            ax.plot(
                [b.tokens for b in mine], [b.accepted for b in mine], style, color=color(index),
                markersize=3, linewidth=1.2, label=domain if name == "present" else None,
            )  # fmt: skip
    later = {b.part: b for b in reversed(blocks) if b.part}
    for b in later.values():
        ax.axvline(b.tokens, color="#8c8c8c", linewidth=0.7)
    ax.set_xlabel(f"tokens served before (dashed: {SETTINGS[plan.against]})")
    ax.set_ylabel("accepted tokens per verification")
    legend(figure, ax)
    save(figure, path)

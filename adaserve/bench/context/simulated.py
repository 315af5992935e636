"""Speculation at long contexts for models and GPUs that are known by their data sheets only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaserve.bench.context.report import Cell, table
from adaserve.bench.context.speedup import Drafting, best, inflection
from adaserve.scheduler.simulator.hardware import hardware_latency, kv_capacity_tokens


@dataclass(frozen=True)
class Simulated:
    """Speedups by costs of a data sheet."""

    title: str
    cells: list[Cell]
    inflections: dict[str, float | None]  # by mode

    @property
    def text(self) -> str:
        """Markdown."""
        lines = ["S_inflection by these costs, over all of these numbers of requests:", ""]
        for mode, length in self.inflections.items():
            lines.append(f"- {mode}: {'none' if length is None else f'{length:.0f} tokens'}")
        return "\n\n".join((f"# {self.title}", table(self.cells), "\n".join(lines)))


def simulate_context(
    model: str,
    gpu: str,
    tp: int,
    requests: Sequence[int],
    contexts: Sequence[int],
    window: int,
    acceptance: float,
    own_acceptance: float,
) -> Simulated:
    """The model's usual draft with everything and with a ``window``, and the target that drafts for itself.

    Cases whose KV cache does not fit are left out. Raises ValueError if none is left, and for models and
    GPUs that are not known.
    """
    latency = hardware_latency(model, gpu, tp)
    room = kv_capacity_tokens(model, gpu, tp)
    ways = [
        Drafting("draft full", latency.draft, acceptance),
        Drafting(f"draft {window}", latency.draft, acceptance, window),
        Drafting(f"self {window}", latency.verify, own_acceptance, window),
    ]
    cells = [
        Cell(n, length, way.name, way.acceptance, best(latency.verify, way, n, length))
        for length in contexts
        for n in requests
        if n * length <= room
        for way in ways
    ]
    if not cells:
        raise ValueError(f"the KV cache has room for {room} tokens: give fewer requests or shorter contexts")
    found = {way.name: inflection(latency.verify, way, requests) for way in ways}
    return Simulated(f"Speculation at long contexts, {latency.source}", cells, found)

"""The servers that are compared: AdaServe, SGLang without speculation, SGLang's STANDALONE speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from adaserve.bench.report import start_server
from adaserve.config import AdaServeConfig
from adaserve.server import Server, ServerSpec, free_port

ADASERVE, PLAIN, STANDALONE = "adaserve", "sglang", "sglang-standalone"
STANDALONE_FLAGS = ("--speculative-num-steps", "4", "--speculative-eagle-topk", "2",
                    "--speculative-num-draft-tokens", "7")  # fmt: skip
"""The tree that SGLang's documentation gives for a stand-alone draft."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two model folders or names, and the device they run on."""

    target: str
    draft: str
    device: str  # cuda | cpu
    flags: tuple[str, ...] = ()  # SGLang's own, for every server
    config: AdaServeConfig = field(default_factory=AdaServeConfig)


@dataclass(frozen=True, slots=True)
class ComparedSpec(ServerSpec):
    """A server of one of the three kinds on the same models and flags."""

    kind: str = ADASERVE

    def command(self) -> list[str]:
        words = ServerSpec.command(self)
        if self.kind == ADASERVE:
            return words
        at = words.index("--speculative-algorithm")
        if self.kind == STANDALONE:
            words[at + 1] = "STANDALONE"
            return [*words, *STANDALONE_FLAGS]
        words = words[:at] + words[at + 2 :]
        at = words.index("--speculative-draft-model-path")
        return words[:at] + words[at + 2 :]


@contextmanager
def serving(pair: Pair, kind: str, log: Path, console: Console) -> Iterator[Server]:
    """A server of ``kind``. Raises ServerError with SGLang's reason when it does not start."""
    cpu = ("--max-total-tokens", "65536") if pair.device == "cpu" else ()
    spec = ComparedSpec(
        pair.target, pair.draft, port=free_port(), config=pair.config, extra=(*cpu, *pair.flags), kind=kind
    )
    # On a CPU the GPU's worker is asked for, so that a dry run goes through its code.
    env = {"ADASERVE_DEVICE_PATH": "1"} if pair.device == "cpu" else {}
    with start_server(spec, log, console, env) as server:
        yield server

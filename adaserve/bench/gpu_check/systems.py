"""The servers that are compared: AdaServe, SGLang alone, and SGLang speculating with the same draft."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.start_server import running_server
from adaserve.checkpoints.draft_kind import DraftKind
from adaserve.config import AdaServeConfig
from adaserve.host.device import PROFILE_ROUTES_ENV
from adaserve.server import ServerProcess, ServerSpec

ADASERVE, PLAIN = "adaserve", "sglang"
NONE = "none"
"""AdaServe's policy that decodes plainly."""
SPECULATING = ("priced", "adaserve")
"""Policies whose speed is measured; the default one first. Targets are met by the best of those that were."""
POLICIES = (*SPECULATING, "chain-4", NONE)
"""All whose outputs are compared, and that serve mixed SLOs."""
TREES = {
    "sglang-own-topk1": ("--speculative-num-steps", "4", "--speculative-eagle-topk", "1",
                         "--speculative-num-draft-tokens", "5"),
    "sglang-own-topk2": ("--speculative-num-steps", "4", "--speculative-eagle-topk", "2",
                         "--speculative-num-draft-tokens", "7"),
}  # fmt: skip
"""SGLang's own speculation: a chain, and the tree that its documentation gives for a stand-alone draft."""
OWN = tuple(TREES)
OWN_ALGORITHM: dict[DraftKind, str] = {"model": "STANDALONE", "eagle3": "EAGLE3", "mtp": "NEXTN"}
"""By the kind of the draft."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two model folders or names, and the device they run on."""

    target: str
    draft: str
    device: str  # cuda | cpu
    flags: tuple[str, ...] = ()  # SGLang's own, for every server
    kind: DraftKind = "model"  # of the draft


def spec_of(pair: Pair, kind: str) -> ServerSpec:
    """A server of one of the kinds on the same models and flags."""
    flags = (*(("--max-total-tokens", "65536") if pair.device == "cpu" else ()), *pair.flags)
    spec = ServerSpec(pair.target, pair.draft, extra=flags)
    if kind in TREES:
        algorithm = OWN_ALGORITHM[pair.kind]
        if algorithm == "STANDALONE":
            # It does not keep the listed tokens' rows, and takes the numbers of all for theirs.
            _, flags = _apart(flags, "--speculative-token-map")
        return replace(spec, algorithm=algorithm, extra=(*flags, *TREES[kind]))
    if kind == PLAIN:
        return replace(spec, algorithm=None)
    # Without a draft model, where others draft.
    ours, flags = _apart(flags, "--adaserve-drafts", "--adaserve-draft-window")
    config = AdaServeConfig(**ours)
    return replace(spec, draft=pair.draft if config.has_model else None, config=config, extra=flags)


def _apart(flags: tuple[str, ...], *names: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the flags with such names say, by the settings that they are, and the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(name, dest=name.removeprefix("--adaserve-").replace("-", "_"))
    given, others = parser.parse_known_args(flags)
    return vars(given), (*others,)


@contextmanager
def serving(pair: Pair, kind: str, log: Path, console: Console, limit_s: float) -> Iterator[ServerProcess]:
    """A server of ``kind``. Raises ServerError with SGLang's reason when it does not start within
    ``limit_s``."""
    # On a CPU the GPU's worker is asked for, so that a dry run goes through its code.
    env = {"ADASERVE_DEVICE_PATH": "1"} if pair.device == "cpu" else {}
    env[PROFILE_ROUTES_ENV] = "1"
    # A server whose scheduler has died would keep its clients waiting for a minute before it ends.
    env |= dict.fromkeys(("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH"), "0")
    with running_server(spec_of(pair, kind), log, console, env, limit_s) as server:
        yield server


class StartedAhead:
    """A server that starts meanwhile, for a ``with`` that comes later. It ends with the thread that started
    it, which therefore waits for the end of that."""

    def __init__(self, server: AbstractContextManager[ServerProcess]) -> None:
        self.ready = threading.Event()
        """It answers, or did not start."""
        self._server, self._over = server, threading.Event()
        self._got: ServerProcess | Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._server as self._got:
                self.ready.set()
                self._over.wait()
        except Exception as error:
            self._got = error
        self.ready.set()

    def __enter__(self) -> ServerProcess:
        """Raises what its start has raised."""
        self.ready.wait()
        if isinstance(self._got, Exception):
            raise self._got
        assert self._got is not None
        return self._got

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.ready.is_set():  # or this process is about to end, and the server with it
            self._thread.join()

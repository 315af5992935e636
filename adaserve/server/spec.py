"""What to serve, and the command line and environment of SGLang's server for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from adaserve.checkpoints.draft_kind import medusa_folder, medusa_heads
from adaserve.checkpoints.hub import why_no_model, why_not_on_hub
from adaserve.config import ENV, AdaServeConfig
from adaserve.host.cores import short_spins, usable_cores
from adaserve.host.device import FORK_ENV, on_cpu
from adaserve.pair.shape import parse_size
from adaserve.pair.vocabulary import MAX_CONTEXT_TOKENS
from adaserve.server.control import ServerError


def api_key(flags: Sequence[str], which: str = "--api-key") -> str | None:
    """The key that a server asks for which was started with these flags; the last one counts."""
    key = None
    for flag, value in zip(flags, (*flags[1:], ""), strict=False):
        name, separator, joined = flag.partition("=")
        if name == which:
            key = joined if separator else value
    return key or None


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Where a server that listens there is asked from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def bearer(flags: Sequence[str], which: str = "--api-key") -> dict[str, str]:
    """The header with which a server that was started with these flags lets a request in."""
    key = api_key(flags, which)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to serve. Without models: the embedded pair, its target widened to ``size`` parameters."""

    model: str | None = None
    draft: str | None = None
    size: str = "100M"
    host: str = "127.0.0.1"
    port: int = 30000
    config: AdaServeConfig = field(default_factory=AdaServeConfig)
    extra: tuple[str, ...] = ()  # SGLang's own flags, passed through
    algorithm: str | None = "ADASERVE"  # of SGLang's speculation; None = SGLang without any

    def __post_init__(self) -> None:
        if "--config" in self._given:
            raise ServerError(
                "--config: the flags that are added here for SGLang would win over that file: give its "
                "settings as flags, or use `adaserve serve`"
            )
        for path in (self.model, self.draft):
            if path is not None and (why := why_no_model(path)) is not None:
                raise ServerError(why)
        if self.model is None and self.draft is not None and not os.path.isdir(self.draft):
            raise ServerError(f"{self.draft} is no draft of the embedded target: give --model-path as well")
        if self.model is None and self.config.draft_kind == "mtp":
            raise ServerError("the embedded target has no MTP layer: give a --model-path that has one")
        own = self.model is not None or self.draft is not None
        if own and (self.draft is not None) != self.config.has_model:
            raise ServerError(
                f"drafts are {self.config.drafts}: "
                + (
                    "give --draft-model-path as well, or --drafts suffix to serve without a draft model"
                    if self.config.has_model
                    else "leave out --draft-model-path, or give --drafts model,suffix"
                )
            )
        if self.embedded:
            parse_size(self.size)
        self.served  # noqa: B018 (what can't be served is refused now)

    @property
    def served(self) -> AdaServeConfig:
        """The configuration, with the draft in it if that is Medusa heads, which SGLang does not load. Raises
        UserError."""
        folder = medusa_folder(self._draft_folder(), self.config.draft_kind)
        if folder is None:
            return self.config
        depth = min(self.config.max_depth, medusa_heads(folder))
        return self.config.changed(medusa=str(folder), max_depth=depth)

    def _draft_folder(self) -> str | None:
        """Where Medusa heads may be: the embedded ones only where they are asked for."""
        if self.embedded and self.draft is None and self.config.draft_kind == "medusa":
            from adaserve.pair.folders import MEDUSA
            from adaserve.pair.widen import shipped_draft

            return str(shipped_draft(MEDUSA))
        return self.draft

    @property
    def embedded(self) -> bool:
        return self.model is None

    @property
    def url(self) -> str:
        return url_of(self.host, self.port, tls="--ssl-certfile" in self._given)

    @property
    def _given(self) -> set[str]:
        """SGLang's own flags among those that were passed on."""
        return {word.partition("=")[0] for word in self.extra}

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.extra)

    def command(self) -> list[str]:
        """The command line of ``sglang.launch_server``; widens the embedded target if need be."""
        model, draft = self.models()
        flags = {"--model-path": model, "--host": self.host, "--port": str(self.port)}
        if self.algorithm is not None:
            flags["--speculative-algorithm"] = self.algorithm
            if draft is not None and self.served.has_model and self.served.medusa is None:
                flags["--speculative-draft-model-path"] = draft
        if on_cpu():
            # Weights are packed by our own forward; SGLang's tensors stay in fp32.
            flags |= {"--device": "cpu", "--dtype": "float32", "--chunked-prefill-size": "256"}
        if self.embedded:
            flags |= {"--served-model-name": "adaserve-embedded", "--max-total-tokens": "65536"}
            flags |= {"--context-length": str(MAX_CONTEXT_TOKENS)}
        given = self._given
        words = [w for flag, value in flags.items() if flag not in given for w in (flag, value)]
        switches = ["--enable-metrics", *(["--sleep-on-idle"] if on_cpu() else [])]
        words += [s for s in switches if s not in given]
        return [sys.executable, "-m", "adaserve.launch", "sglang.launch_server", *words, *self.extra]

    def models(self) -> tuple[str, str | None]:
        """Target and draft."""
        if self.model is not None:
            return self.model, self.draft
        from adaserve.pair.folders import HEAD, MEDUSA
        from adaserve.pair.widen import ensure_embedded_pair

        heads = {"eagle3": HEAD, "medusa": MEDUSA}
        target, draft = ensure_embedded_pair(self.size, draft=heads.get(self.config.draft_kind, "draft"))
        return str(target), self.draft or str(draft)

    def environment(self) -> dict[str, str]:
        """The environment of the server: our configuration, quiet start, sane threads."""
        config = self.served
        if self.embedded and config.cpu_weights == "auto":
            # The embedded target stands in for a memory-bound one: the more bytes a weight has, the more
            # tokens a CPU verifies while it waits for memory (docs/embedded-pair.md).
            config = config.changed(cpu_weights="fp32")
        env = {**os.environ, ENV: config.to_json()}
        env.setdefault("OMP_NUM_THREADS", str(usable_cores()))
        env.setdefault("PYTHONWARNINGS", "ignore")
        # An HTTP worker imports SGLang before it answers uvicorn's health check. Uvicorn kills it after 10 s
        # and starts another one, so with several workers on a busy host none would ever be ready.
        env.setdefault("SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT", "120")
        if on_cpu():
            env.setdefault(FORK_ENV, "1")
            # A process with threads cannot be forked; nothing multiplies large matrices in numpy.
            env.setdefault("OPENBLAS_NUM_THREADS", "1")
            short_spins(env)
        return env


def require_models(spec: ServerSpec) -> None:
    """Raises ServerError where a model is neither here nor can be downloaded."""
    for name in (spec.model, spec.draft, spec.config.second_draft):
        if name is not None and (why := why_not_on_hub(name)) is not None:
            raise ServerError(why)

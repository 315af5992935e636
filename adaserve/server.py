"""Starts SGLang servers with AdaServe: the command line, and a child process for tools and tests."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from adaserve.checkpoints.draft_kind import medusa_folder, medusa_heads
from adaserve.checkpoints.hub import why_no_model, why_not_on_hub
from adaserve.config import ENV, AdaServeConfig
from adaserve.errors import UserError
from adaserve.host.cores import short_spins, usable_cores
from adaserve.host.device import FORK_ENV, select
from adaserve.host.lifetime import PARENT_ENV, WHERE_SIGNAL
from adaserve.host.ports import why_not_free
from adaserve.host.processes import (
    family,
    left_behind,
    metrics_folders,
    remove,
    remove_folders,
    shared_memory,
    told_counters,
)
from adaserve.pair.shape import parse_size
from adaserve.pair.vocabulary import MAX_CONTEXT_TOKENS
from adaserve.redaction import without_secrets

START_TIMEOUT_S = 600.0
STOP_PATIENCE_S = 1.0
"""SGLang's schedulers end at once. Its first process would then sleep for five seconds, and end as well."""
HEALTH_S = 25.0
"""SGLang's `/health` waits for a token, for which it looks once a second, up to 20 times."""
_DRAIN_S = 60.0
_REFUSED = "Scheduler hit an exception: "  # and a sentence of ours, or a traceback
_BIND_ERROR = "error while attempting to bind on address"  # uvicorn's


class ServerError(UserError, RuntimeError):
    """A server did not start, or died; the message says why and what to do."""


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
        if self.model is None and self.draft is not None:
            raise ServerError("a draft model needs a target of the same family: give --model-path as well")
        if self.model is None and self.config.draft_kind == "mtp":
            raise ServerError("the embedded target has no MTP layer: give a --model-path that has one")
        if self.model is not None and (self.draft is not None) != self.config.has_model:
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
        """The configuration, told of the draft where that is Medusa heads: those SGLang doesn't load.

        Raises UserError."""
        folder = medusa_folder(self._draft_folder(), self.config.draft_kind)
        if folder is None:
            return self.config
        depth = min(self.config.max_depth, medusa_heads(folder))
        return self.config.changed(medusa=str(folder), max_depth=depth)

    def _draft_folder(self) -> str | None:
        """Where Medusa heads may be: the embedded ones only where they are asked for."""
        if self.embedded and self.config.draft_kind == "medusa":
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
        return str(target), str(draft)

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


def on_cpu() -> bool:
    """Whether our CPU platform serves on this host."""
    return select() is not None


def require_free(host: str, port: int) -> None:
    """Raises ServerError where a server cannot listen there: SGLang would find out half a minute later."""
    if (why := why_not_free(host, port)) is not None:
        raise ServerError(why)


class Spec(Protocol):
    """A server that can be started: ours, or a router."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]:
        """What requests to it need, so that they are let in."""
        ...

    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...


class ServerProcess:
    """A server in a process group of its own; stopped, with all its children, on exit.

    ::

        with ServerProcess(ServerSpec(port=free_port()), log=Path("server.log")) as server:
            httpx.post(server.url + "/generate", ...)
    """

    def __init__(
        self,
        spec: Spec,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.spec, self.log = spec, log
        self.url = spec.url
        self._env = {**spec.environment(), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0  # epoch
        self._leaves = set[Path](), set[Path]()  # shared memory, and counters, of one that was up

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self, waiting: Callable[[float], None] = lambda _: None, limit_s: float = START_TIMEOUT_S
    ) -> None:
        """Returns when the server answers; ``waiting`` gets the seconds so far. Raises ServerError, also
        after ``limit_s``."""
        require_free(self.spec.host, self.spec.port)
        command = self.spec.command()
        self._started_s = time.time()
        self.log.parent.mkdir(parents=True, exist_ok=True)  # a folder for temporary files is cleaned at times
        self.log.open("wb").close()
        with self.log.open("ab", buffering=0) as log:  # appends, so that somebody may cut off what is there
            with suppress(OSError):  # a full disk is no reason not to serve
                log.write(f"$ {shlex.join(without_secrets(command))}\n".encode())
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self._env, PARENT_ENV: str(os.getpid())},
                start_new_session=True,
            )
        try:
            self._await_health(waiting, limit_s)
            self._leaves = self._mapped()  # nobody can say so any more once it is killed
        except BaseException:
            self.stop()
            raise

    def _await_health(self, waiting: Callable[[float], None], limit_s: float) -> None:
        assert self._process is not None
        start_s = time.monotonic()
        while (waited_s := time.monotonic() - start_s) < limit_s:
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server {self.how} while it started:\n{self.why()}\n(full log: {self.log})"
                )
            if _BIND_ERROR in self._logged():
                # SGLang stays up without its HTTP server.
                raise ServerError(
                    f"port {self.spec.port} was taken while the server started: start it again, or choose "
                    f"another with --port (full log: {self.log})"
                )
            waiting(waited_s)
            try:
                if self._ask("GET", "/health", timeout=HEALTH_S).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        self._say_where()
        raise ServerError(f"the server did not answer within {limit_s:.0f} s; see {self.log}")

    @property
    def how(self) -> str:
        """How it ended, where its log cannot know."""
        killed = self._process is not None and self._process.poll() == -signal.SIGKILL
        return "was killed by SIGKILL, as where the host has no memory left" if killed else "ended"

    def why(self) -> str:
        """The lines of the log that best explain what went wrong."""
        lines = self._logged().splitlines()
        errors = [
            line
            for line in lines
            if line.startswith(("ValueError", "RuntimeError", "adaserve.", "adaserve: ", "error: "))
            or "Error: " in line
            or _REFUSED in line
        ]
        return "\n".join(errors[-3:] or lines[-15:]) or "its log is empty, as where the disk is full"

    def _logged(self) -> str:
        """Nothing where somebody has removed the log."""
        try:
            return self.log.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def give_up(self) -> None:
        """Stops a server that hangs; its log says where each of its threads was."""
        self._say_where()
        self.stop()

    def _say_where(self) -> None:
        """Before an end only: what is no Python process of SGLang's ends at once."""
        for process in family(self.pid) if self._process is not None else ():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(WHERE_SIGNAL)
        time.sleep(STOP_PATIENCE_S)

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ends the server and everything that it started. What is left after ``patience_s`` is killed, the
        first process before the others. The shared memory that they leave behind is removed."""
        process = self._process
        if process is None:
            return
        members = family(process.pid)
        leaves = zip(self._leaves, self._mapped(), strict=True)
        shared, folders = (before | now for before, now in leaves)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        psutil.wait_procs(members, timeout=patience_s)
        process.kill()
        alive = psutil.wait_procs(members, timeout=STOP_PATIENCE_S)[1]
        for p in alive:
            p.kill()
        psutil.wait_procs(alive, timeout=5.0)
        process.wait()
        remove(left_behind(shared, self._started_s))
        remove_folders(folders - {told_counters(self._env)})
        self._process, self._leaves = None, (set(), set())

    def _mapped(self) -> tuple[set[Path], set[Path]]:
        """Shared memory, and folders of counters, that its processes use."""
        pids = [self.pid, *(p.pid for p in family(self.pid))]
        return set().union(*map(shared_memory, pids)), set().union(*map(metrics_folders, pids))

    @property
    def code(self) -> int | None:
        """Exit code of its first process; None while that runs, or where there is none."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of a server that was started; its other processes are children."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def report(self) -> dict[str, Any]:
        """State of the first scheduler: policy, baseline, times, statistics."""
        info = self._ask("GET", "/server_info").raise_for_status().json()
        return dict(info["internal_states"][0]["adaserve"])

    def set_policy(self, name: str) -> None:
        """Changes the policy of the running server. Raises ServerError."""
        self._set("policy", name)

    def set_prefill(self, mode: str) -> None:
        """Changes when the running server prefills: slack or exclusive. Raises ServerError."""
        self._set("prefill", mode)

    def set_draft(self, name: str) -> None:
        """Where a draft learns: serves the "first" one, the "present" one, or that one "held" as it is.

        Raises ServerError."""
        self._set("draft", name)

    def number_requests(self, number: int) -> None:
        """The same requests after the same number, in one call, get the same texts. Raises ServerError."""
        self._set_state({"adaserve_next_request": number})

    def _set(self, setting: str, value: str) -> None:
        self._set_state({f"adaserve_{setting}={value}": 1})

    def fix_baseline(self, baseline_ms: float, headers: Mapping[str, str]) -> None:
        """Nothing changes the server's baseline any more. ``headers``: its admin's. Raises ServerError."""
        self._set_state({"adaserve_baseline_ms": baseline_ms}, headers)

    def _set_state(self, values: dict[str, float], headers: Mapping[str, str] | None = None) -> None:
        body = {"server_args": values}
        answer = self._ask("POST", "/set_internal_state", json=body, headers=headers)
        if answer.status_code != 200:
            raise ServerError(f"the server refused {values}: {answer.text}")

    def drain(self) -> None:
        """Waits until nothing runs and empties the prefix cache; requests that take too long are aborted.

        Raises ServerError when the server does not become idle."""
        end_s = time.monotonic() + _DRAIN_S
        while self._ask("POST", "/flush_cache").status_code != 200:
            if time.monotonic() > end_s:
                raise ServerError(f"the server did not become idle within {_DRAIN_S:.0f} s")
            self._ask("POST", "/abort_request", json={"rid": "", "abort_all": True})
            time.sleep(0.5)

    def _ask(
        self,
        method: str,
        path: str,
        json: Any = None,
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Raises httpx.HTTPError."""
        headers = headers or self.spec.headers
        return httpx.request(method, self.url + path, json=json, timeout=timeout, headers=headers)

"""The start of a server: ports that somebody else takes, and HTTP workers that take their time."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from adaserve.config import AdaServeConfig
from adaserve.errors import UserError
from adaserve.host.ports import free_port
from adaserve.server import ServerError, ServerProcess, ServerSpec

LINE = (
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
)


class Robbed(ServerSpec):
    """What SGLang does then: it says so, and stays up without its HTTP server."""

    __slots__ = ()

    def command(self) -> list[str]:
        return [sys.executable, "-c", f"import time; print({LINE!r}, flush=True); time.sleep(600)"]


def test_a_port_taken_meanwhile_ends_the_start_at_once(tmp_path: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(ServerError, match="was taken while the server started: start it again"):
        ServerProcess(Robbed("model", "draft", port=free_port()), tmp_path / "server.log").__enter__()
    assert time.monotonic() - start_s < 60, "it was waited for"
    assert not [c for c in psutil.Process().children() if LINE in " ".join(c.cmdline())]


class Slow(ServerSpec):
    """A healthy server whose one token takes longer than two seconds."""

    __slots__ = ()

    def command(self) -> list[str]:
        code = f"""
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Slow(BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(3.0)
        self.send_response(200)
        self.end_headers()
ThreadingHTTPServer(("127.0.0.1", {self.port}), Slow).serve_forever()
"""
        return [sys.executable, "-c", code]


def test_a_server_that_takes_seconds_for_a_token_has_started_all_the_same(tmp_path: Path) -> None:
    with ServerProcess(Slow("model", "draft", port=free_port()), tmp_path / "server.log") as server:
        assert server.alive


class Sharing(ServerSpec):
    """Holds shared memory, a file of the model's name and one named by its id, and can't remove them once it
    is killed."""

    __slots__ = ()

    def command(self) -> list[str]:
        share = f"import mmap; f = open({self.model!r}, 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9)"
        named = "import os; pid = os.getpid(); open(f'/dev/shm/multi_tokenizer_args_{pid}', 'w').close()"
        wait = "print('shared', pid, flush=True); import time; time.sleep(600)"
        return [sys.executable, "-c", f"{share}; {named}; {wait}"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_shared_memory_is_not_left_behind(tmp_path: Path) -> None:
    path, log = Path(f"/dev/shm/adaserve-test-{os.getpid()}"), tmp_path / "server.log"
    path.touch()
    named: list[Path] = []

    def interrupt(_: float) -> None:
        for line in log.read_text().splitlines():
            if line.startswith("shared "):
                named.append(Path(f"/dev/shm/multi_tokenizer_args_{line.split()[1]}"))
                assert path.exists() and named[0].exists()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ServerProcess(Sharing(str(path), "draft", port=free_port()), log).start(interrupt)
    assert not path.exists() and not named[0].exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_counters_are_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server that is stopped so would leave 300 kB among the temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counters, log = tmp_path / "tmpab_12cd4" / "counter_1.db", tmp_path / "server.log"
    counters.parent.mkdir()
    counters.touch()

    def interrupt(_: float) -> None:
        if "shared " in log.read_text():
            raise KeyboardInterrupt

    for told in ({"PROMETHEUS_MULTIPROC_DIR": str(counters.parent)}, {}):
        with pytest.raises(KeyboardInterrupt):
            ServerProcess(Sharing(str(counters), "draft", port=free_port()), log, told).start(interrupt)
        assert counters.parent.exists() == bool(told), "one that it was told of others may use as well"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_server_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet goes on for weeks and starts its replicas again, also where the host has too little memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counters, log = tmp_path / "tmpab_12cd4" / "counter_1.db", tmp_path / "server.log"
    counters.parent.mkdir()
    counters.touch()
    server = ServerProcess(Sharing(str(counters), "draft", port=free_port()), log)

    def shared(waiting: object, limit_s: float) -> None:
        while "shared " not in log.read_text():
            time.sleep(0.01)

    monkeypatch.setattr(server, "_await_health", shared)
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        time.sleep(0.01)
    assert counters.exists()
    server.stop()
    assert not counters.parent.exists()


class Ending(ServerSpec):
    """Says why, and ends at once."""

    __slots__ = ()

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-c",
            "print('loads\\nadaserve: why\\nends')",
            "--port",
            str(self.port),
            *self.extra,
        ]


def test_a_log_holds_no_keys(tmp_path: Path) -> None:
    spec = Ending("model", "draft", port=free_port(), extra=("--api-key", "mine", "--admin-api-key=root's"))
    with pytest.raises(ServerError, match=r"ended while it started:\nadaserve: why\n\(full log"):
        ServerProcess(spec, tmp_path / "server.log").start()
    told = (tmp_path / "server.log").read_text()
    assert f"--port {spec.port} --api-key" in told and "mine" not in told and "root" not in told


def test_why_a_scheduler_refused_its_models(tmp_path: Path) -> None:
    ended = ServerProcess(Ending("model", "draft", port=1), tmp_path / "server.log")
    ended.log.write_text("loads\n[noon] Scheduler hit an exception: too little room\n[noon] kill\n")
    assert ended.why() == "[noon] Scheduler hit an exception: too little room"
    ended.log.write_text("")
    assert "disk is full" in ended.why()


@pytest.mark.parametrize(
    ("host", "flags", "url"),
    [
        ("127.0.0.1", (), "http://127.0.0.1:9"),
        ("0.0.0.0", (), "http://127.0.0.1:9"),
        ("::", (), "http://[::1]:9"),
        ("fd00::7", (), "http://[fd00::7]:9"),
        ("localhost", ("--ssl-certfile=c", "--ssl-keyfile", "k"), "https://localhost:9"),
    ],
)
def test_where_a_server_is_asked(host: str, flags: tuple[str, ...], url: str) -> None:
    assert ServerSpec("model", "draft", host=host, port=9, extra=flags).url == url


def test_http_workers_may_take_their_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn kills a worker that does not answer in time, and importing SGLang takes 20 s on a busy host."""
    from sglang.srt.environ import envs

    name = "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(name, ServerSpec("model", "draft").environment()[name])
    assert envs.SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT.get() >= 60
    monkeypatch.setenv(name, "5")
    assert ServerSpec("model", "draft").environment()[name] == "5", "what the user sets counts"


@pytest.mark.parametrize(
    ("model", "draft", "drafts", "says"),
    [
        (None, "d", "model", "--model-path"),
        ("m", None, "model", "--drafts suffix"),
        ("m", None, "model,suffix", "--draft-model-path"),
        ("m", "d", "suffix", "--drafts model,suffix"),
    ],
)
def test_models_that_do_not_fit_the_drafts(
    model: str | None, draft: str | None, drafts: str, says: str
) -> None:
    with pytest.raises(ServerError, match=says):
        ServerSpec(model, draft, config=AdaServeConfig(drafts=drafts))


@pytest.mark.parametrize("words", [("--config", "flags.yaml"), ("--config=flags.yaml",)])
def test_a_file_of_flags_would_lose_against_ours(words: tuple[str, ...]) -> None:
    with pytest.raises(ServerError, match="give its settings as flags, or use `adaserve serve`"):
        ServerSpec("m", "d", extra=words)


def test_a_model_alone_is_served_without_a_draft() -> None:
    command = ServerSpec("m", config=AdaServeConfig(drafts="suffix")).command()
    assert "--speculative-draft-model-path" not in command and "m" in command
    both = ServerSpec("m", "d", config=AdaServeConfig(drafts="model,suffix")).command()
    assert both[both.index("--speculative-draft-model-path") + 1] == "d"


def test_sglang_is_not_told_of_medusa_heads(tmp_path: Path) -> None:
    """It would not know what they are. No tree is deeper than there are heads."""
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    spec = ServerSpec("m", str(tmp_path), config=AdaServeConfig(max_depth=5))
    assert "--speculative-draft-model-path" not in spec.command()
    config = AdaServeConfig(**json.loads(spec.environment()["ADASERVE_CONFIG"]))
    assert (config.medusa, config.max_depth) == (str(tmp_path), 3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_kind": "model"}, "--draft-kind auto"),
        ({"second_draft": "lab/second"}, "leave --second-draft out"),
        ({"learn": True}, "leave --learn out"),
        ({"draft_window": 64}, "--draft-window 0"),
    ],
)
def test_where_no_medusa_heads_are_served(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    with pytest.raises(UserError, match=says):
        ServerSpec("m", str(tmp_path), config=AdaServeConfig(**settings))


class Hanging(ServerSpec):
    """Never answers."""

    __slots__ = ()

    def command(self) -> list[str]:
        lines = [
            "import adaserve.host.signals as s, threading",
            "def waits_for_the_gpu():",
            "    print('hangs', flush=True)",
            "    threading.Event().wait(600)",
            "s.dump_stacks_on_signal()",
            "waits_for_the_gpu()",
        ]
        return [sys.executable, "-c", "\n".join(lines)]


def test_a_server_that_hangs_says_where(tmp_path: Path) -> None:
    log = tmp_path / "server.log"

    def until_it_hangs(_: float) -> None:
        while "hangs" not in log.read_text().splitlines():
            time.sleep(0.01)

    with pytest.raises(ServerError, match="did not answer within 1 s"):
        ServerProcess(Hanging("model", "draft", port=free_port()), log).start(until_it_hangs, limit_s=1.0)
    assert "in waits_for_the_gpu" in log.read_text()

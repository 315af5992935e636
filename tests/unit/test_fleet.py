"""How a fleet is put together, and what is said when it cannot start."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.engine.costs.cost_monitor import FIRST_LOOK
from adaserve.fleet import cli, local
from adaserve.fleet.local import GRACE_S, Fleet, ReplicaSpec, RouterSpec
from adaserve.host.ports import free_port
from adaserve.server import ServerError, ServerProcess
from adaserve.slo.resolve import START_PARAMS, START_TEXT


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both routers were there."""
    monkeypatch.setattr(local, "find_spec", lambda name: object())


def test_a_router_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'adaserve\[fleet\]'"):
        RouterSpec(("http://127.0.0.1:1",))
    with pytest.raises(ServerError, match="pip install smg"):
        RouterSpec(("http://127.0.0.1:1",), "smg")
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path), "--router", "nginx"])
    assert said.exit_code == 2 and "choose sglang-router or smg" in said.output
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path), "--ssl-certfile=c"])
    assert said.exit_code == 2 and "leave out --ssl-" in said.output
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path), "--learn-folder=drafts"])
    assert said.exit_code == 2 and "leave out --learn-folder" in said.output
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path), "--port", "65533"])
    assert said.exit_code == 2 and "choose a lower --port" in said.output


@pytest.mark.usefixtures("installed")
def test_ports_flags_and_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "usable_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    fleet = Fleet.of(2, ("--size", "12M"), tmp_path, "smg", ("--policy=power_of_two",), "0.0.0.0", 9000)
    assert [replica.url for replica in fleet.replicas] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert [replica._env["OMP_NUM_THREADS"] for replica in fleet.replicas] == ["2", "2"]
    replica, router = fleet.replicas[0].spec.command(), fleet.router.spec.command()
    assert replica[-6:] == ["--size", "12M", "--host", "127.0.0.1", "--port", "9001"]
    assert router[router.index("--prometheus-port") + 1] == "9003"
    assert router[-3:] == ["--worker-urls", *(replica.url for replica in fleet.replicas)]
    assert "--policy=power_of_two" in router and "--policy" not in router, "the user's flag wins"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (replica,) = Fleet.of(1, (), tmp_path).replicas
    assert replica._env["OMP_NUM_THREADS"] == "3", "and so does the user's environment"


class Refusing(BaseHTTPRequestHandler):
    """A replica that answers 400 to what is wrong."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"model_path": "m", "served_model_name": "m", "is_generation": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(400 if body["prompt"] == "wrong" else 200, {"choices": []})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.skipif(find_spec("sglang_router") is None, reason="needs sglang-router")
def test_the_mistakes_of_one_client_take_no_replica_away_from_others(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as replica:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        urls = (f"http://127.0.0.1:{replica.server_port}",)
        spec = RouterSpec(urls, port=free_port(), metrics_port=free_port())
        with ServerProcess(spec, tmp_path / "router.log") as router:

            def status(prompt: str) -> int:
                body = {"model": "m", "prompt": prompt, "max_tokens": 1}
                return httpx.post(router.url + "/v1/completions", json=body, timeout=60).status_code

            end_s = time.monotonic() + 60
            while status("right") != 200:
                assert time.monotonic() < end_s, "the router does not know its replica"
            assert [status(p) for p in (*["wrong"] * 12, "right")] == [400] * 12 + [200]
        replica.shutdown()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "flags", ["--port 31000", "--host=0.0.0.0 --policy random", "--worker-urls http://a"]
)
def test_a_router_is_asked_where_the_fleet_says(flags: str, tmp_path: Path) -> None:
    """Elsewhere the fleet would wait for it for ten minutes, and then end the replicas."""
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path), "--router-flags", flags])
    assert said.exit_code == 2 and "the router's flags may not have --" in said.output


def test_all_replicas_promise_what_the_first_one_measured() -> None:
    flags = ("--size", "12M")
    assert ReplicaSpec(1, flags).promising(18.04321).flags == (*flags, "--baseline-ms", "18.04")
    for own in (("--baseline-ms", "20"), ("--baseline-ms=20",), ("--adaserve-baseline-ms", "20")):
        assert ReplicaSpec(1, own).promising(18.0).flags == own, "the user's flag wins"


@pytest.mark.usefixtures("installed")
def test_a_replica_that_cannot_start_ends_the_fleet(tmp_path: Path) -> None:
    fleet = Fleet.of(2, ("--policy", "nonsense"), tmp_path, port=free_port(4))
    log = fleet.replicas[0].log
    log.write_text("why the run before ended")
    with pytest.raises(ServerError, match="unknown policy 'nonsense'"):
        fleet.up()
    assert not any(process.alive for process in (*fleet.replicas, fleet.router))
    assert log.with_suffix(".ended.log").read_text() == "why the run before ended"


@pytest.mark.usefixtures("installed")
def test_a_port_in_use_is_said_before_any_replica_starts(tmp_path: Path) -> None:
    port = free_port(3)
    fleet = Fleet.of(1, (), tmp_path, port=port)
    for taken in (port, port + 1, port + 2):  # of the router, the replica and the router's metrics
        with socket.create_server(("127.0.0.1", taken)), pytest.raises(ServerError, match=f"port {taken} is"):
            fleet.up()
    assert not list(tmp_path.iterdir())


class Guarded(BaseHTTPRequestHandler):
    """Answers as a router, a replica and its `/health` do, to those who have the key."""

    changes: ClassVar[list[tuple[str | None, Any]]] = []
    """What was to be changed, and with which key."""
    plain: ClassVar[list[int]] = []
    """Iterations of each request without speculation, of the kind that no server counts."""

    def do_GET(self) -> None:
        allowed = self.path == "/health" or self.headers["Authorization"] == "Bearer K"
        state = [{"adaserve": {"baseline_ms": 12.5}}]
        body = json.dumps({"workers": [{"is_healthy": True}], "internal_states": state}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/set_internal_state":
            self.changes.append((self.headers["Authorization"], body["server_args"]))
            self.headers.replace_header("Authorization", "Bearer K")
        elif self.headers["x-adaserve-speculation"] == "off" and body["text"] == START_TEXT:
            assert body["sampling_params"] == START_PARAMS
            self.plain.append(body["sampling_params"]["max_new_tokens"] - 1)
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.usefixtures("installed")
def test_the_first_replica_keeps_what_the_others_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it goes on learning, and a class is soon another SLO there than elsewhere."""
    monkeypatch.setattr(ServerProcess, "start", lambda self, waiting: None)
    keys, changes = ("--api-key", "K"), Guarded.changes
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def first(*flags: str) -> Fleet:
            fleet = Fleet.of(1, (*keys, *flags), tmp_path, port=server.server_port - 1)
            fleet._start(0, print)
            return fleet

        assert not first("--admin-api-key", "A").notes
        assert changes == [("Bearer A", {"adaserve_baseline_ms": 12.5})]
        assert not first("--baseline-ms", "20").notes, "the user's is fixed already"
        assert "give --admin-api-key or --baseline-ms" in first().notes[0]
        assert len(changes) == 1, "with an API key only nobody may change a server"
        server.shutdown()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("flags", [("--api-key", "K"), ("--api-key=wrong", "--api-key=K")])
def test_a_fleet_with_a_key_asks_with_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Its own questions too: how many replicas are healthy, and what baseline the first one measured."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fleet = Fleet.of(1, flags, tmp_path, port=server.server_port)
        assert fleet.healthy() == 1
        replica = ServerProcess(ReplicaSpec(server.server_port, flags), tmp_path / "replica.log")
        Guarded.plain.clear()
        assert local._settled_baseline_ms(replica) == 12.5
        assert sum(Guarded.plain) >= FIRST_LOOK, "what it has learned corrects the baseline only then"
        replica.spec = ReplicaSpec(server.server_port, ())
        with pytest.raises(ServerError, match="401"):
            local._settled_baseline_ms(replica)
        server.shutdown()
    command = fleet.router.spec.command()
    assert command[command.index("--api-key") + 1] == "K", "the router asks the replicas, too"
    own = Fleet.of(1, flags, tmp_path, "sglang-router", ("--api-key=R",)).router.spec
    assert own.headers == {"Authorization": "Bearer R"} and "K" not in own.command()


@pytest.mark.usefixtures("installed")
def test_a_file_of_flags_holds_for_the_fleet_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key that stands only there is the router's, too, and so is the address: as before."""
    made: list[Fleet] = []

    def up(fleet: Fleet, say: object) -> None:
        made.append(fleet)
        raise ServerError("far enough")

    monkeypatch.setattr(Fleet, "up", up)
    (tmp_path / "flags.yaml").write_text("api-key: K\nhost: ::1\nport: 5\nadaserve-baseline-ms: 20\n")
    words = ["--config", str(tmp_path / "flags.yaml"), "--logs", str(tmp_path), "--port", "9000"]
    said = CliRunner().invoke(app, ["fleet", "up", *words])
    assert "far enough" in said.output
    (fleet,) = made
    assert fleet.router.spec.headers == {"Authorization": "Bearer K"} == fleet.replicas[0].spec.headers
    assert [replica.url for replica in fleet.replicas] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    spec = fleet.replicas[0].spec
    assert isinstance(spec, ReplicaSpec) and spec.promising(18.0) == spec, "the file gives a baseline"
    assert spec.command()[-2:] == ["--port", "9001"]
    assert fleet.url == "http://[::1]:9000", "the command line wins"
    CliRunner().invoke(app, ["fleet", "up", *words[:-2]])
    assert [made[1].url, made[1].replicas[0].url] == ["http://[::1]:5", "http://127.0.0.1:6"]


@pytest.mark.usefixtures("installed")
def test_a_log_says_what_a_fleet_waits_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under a service manager it would say nothing for minutes; a line for each second would be too much."""

    def up(fleet: Fleet, say: Callable[[str], None]) -> None:
        for text in ("starting replica 1 of 2 (0 s)", "starting replica 1 of 2 (1 s)", "starting the router"):
            say(text)
        raise ServerError("far enough")

    monkeypatch.setattr(Fleet, "up", up)
    said = CliRunner().invoke(app, ["fleet", "up", "--logs", str(tmp_path)])
    assert said.stderr.splitlines() == ["starting replica 1 of 2", "starting the router", "error: far enough"]


def test_a_fleet_that_is_refused_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = CliRunner().invoke(app, ["fleet", "up", "--router", "nginx"])
    assert said.exit_code == 2 and not list(tmp_path.iterdir())


class Script(ReplicaSpec):
    """Runs its one flag, which is Python, in place of a server."""

    __slots__ = ()

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.flags[0]]

    def promising(self, baseline_ms: float) -> ReplicaSpec:
        return self


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for answers of what was started."""
    monkeypatch.setattr(ServerProcess, "_await_health", lambda self, waiting, limit_s: None)
    monkeypatch.setattr(local, "_settled_baseline_ms", lambda replica: 10.0)


def kill(process: ServerProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)


@pytest.mark.usefixtures("installed", "at_once")
def test_what_dies_is_started_again_wherever_its_log_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs that clean folders for temporary files remove logs."""
    logs, idle = tmp_path / "logs", ("import time; time.sleep(600)",)
    fleet = Fleet([Script(free_port(), idle)], RouterSpec(()), logs)
    fleet.router.spec = Script(free_port(), idle)
    said: list[str] = []
    try:
        fleet._start_router(print)
        fleet._start(0, print)
        fleet.repair(said.append)
        assert not said, "all is well"
        for process in (fleet.router, fleet.replicas[0]):
            kill(process)
            with pytest.raises(ServerError, match=r"was killed by SIGKILL, .* soon after its start"):
                fleet.repair(said.append)
        monkeypatch.setattr(local, "MIN_LIFE_S", 0.0)
        fleet.router.log.unlink()
        fleet.repair(said.append)
        assert fleet.router.alive and fleet.replicas[0].alive
    finally:
        fleet.down(0.0)
    how = "was killed by SIGKILL, as where the host has no memory left; starting it again."
    assert said[0].startswith(f"the router {how} Its log ") and "can't be kept" in said[0]
    assert said[1:] == [
        "the router answers again",
        f"replica 1 {how} Its log until then: {fleet.replicas[0].log.with_suffix('.ended.log')}",
        "replica 1 answers again",
    ]


@pytest.mark.usefixtures("installed")
def test_what_dies_while_a_replica_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others could serve meanwhile: for a minute, or for ten where it hangs."""
    monkeypatch.setattr(local, "MIN_LIFE_S", 0.0)
    monkeypatch.setattr(local, "_settled_baseline_ms", lambda replica: 10.0)
    idle = ("import time; time.sleep(600)",)
    fleet = Fleet([Script(free_port(), idle) for _ in range(2)], RouterSpec(()), tmp_path)
    fleet.router.spec = Script(free_port(), idle)
    said: list[str] = []

    def await_health(process: ServerProcess, waiting: Callable[[float], None], limit_s: float) -> None:
        if process is fleet.replicas[0] and said:
            for other in (fleet.router, fleet.replicas[1]):
                kill(other)
            waiting(0.0)
            assert fleet.router.alive and fleet.replicas[1].alive

    monkeypatch.setattr(ServerProcess, "_await_health", await_health)
    try:
        for i in range(2):
            fleet._start(i, print)
        fleet._start_router(print)
        kill(fleet.replicas[0])
        fleet.repair(said.append)
        monkeypatch.setattr(local, "MIN_LIFE_S", 30.0)
        fleet._started_s[0] = -math.inf  # unlike that of the router
        kill(fleet.replicas[0])
        with pytest.raises(ServerError, match=r"^the router was killed"):
            fleet.repair(lambda _: None)
    finally:
        fleet.down(0.0)
    assert [text.partition(" was")[0] for text in said] == [
        "replica 1", "the router", "the router answers again", "replica 2", "replica 2 answers again",
        "replica 1 answers again",
    ]  # fmt: skip


@pytest.mark.usefixtures("installed", "at_once")
def test_a_replica_that_fails_is_put_off_while_others_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mistake in its file of classes, say, which it reads when it is started again, must not end them."""
    idle = ("import time; time.sleep(600)",)
    fleet = Fleet([Script(free_port(), idle) for _ in range(2)], RouterSpec(()), tmp_path)
    fleet.router.spec = Script(free_port(), idle)
    failing, other = fleet.replicas
    said: list[str] = []
    try:
        fleet._start_router(print)
        for i in range(2):
            fleet._start(i, print)
        kill(failing)
        fleet.repair(said.append)
        fleet.repair(said.append)
        assert len(said) == 1 and "soon after its start" in said[0] and "the others serve" in said[0]
        monkeypatch.setattr(local, "RETRY_S", 0.0)
        fleet._retry_s[0] = 0.0
        with socket.create_server(("127.0.0.1", failing.spec.port)):
            fleet.repair(said.append)
        assert said[1].startswith("replica 1 ended; starting it again")
        assert said[2].startswith("replica 1 cannot be started: port ")
        fleet.repair(said.append)
        assert failing.alive and other.alive and said[-1] == "replica 1 answers again"
        kill(other)
        kill(failing)
        with pytest.raises(ServerError, match="soon after its start"):
            fleet.repair(said.append)
    finally:
        fleet.down(0.0)


@pytest.mark.usefixtures("installed", "at_once")
def test_a_replica_that_is_told_to_end_soon_has_not_failed(tmp_path: Path) -> None:
    """SIGTERM is how one replica is restarted, at any time."""
    orderly = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print(); time.sleep(600)"
    fleet = Fleet([Script(free_port(), (orderly,))], RouterSpec(()), tmp_path)
    fleet.router.spec = Script(free_port(), ("import time; time.sleep(600)",))
    (replica,) = fleet.replicas
    said: list[str] = []
    try:
        fleet._start_router(print)
        fleet._start(0, print)
        while not replica.log.read_text().endswith("\n\n"):  # behind its command line
            time.sleep(0.01)
        os.kill(replica.pid, signal.SIGTERM)
        while replica.alive:
            time.sleep(0.01)
        fleet.repair(said.append)
        assert replica.alive and said[-1] == "replica 1 answers again"
    finally:
        fleet.down(0.0)


def test_fleets_may_share_a_folder_for_logs(tmp_path: Path) -> None:
    fleets = [Fleet([ReplicaSpec(port + 1)], RouterSpec((), port=port), tmp_path) for port in (5, 7)]
    assert len({process.log for fleet in fleets for process in (*fleet.replicas, fleet.router)}) == 4


def test_a_fleet_drains_though_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends `| tee` as well."""

    def watch(say: Callable[[str], None]) -> None:
        say("replica 1 ended")
        raise KeyboardInterrupt

    graces: list[float] = []
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(KeyboardInterrupt):
            cli._serve(cast("Fleet", SimpleNamespace(watch=watch, down=graces.append)))
    assert graces == [GRACE_S]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.usefixtures("at_once")
def test_a_full_disk_is_no_reason_not_to_start() -> None:
    with ServerProcess(Script(free_port(), ("import time; time.sleep(600)",)), Path("/dev/full")) as server:
        assert server.alive


@pytest.mark.usefixtures("at_once")
def test_a_log_that_has_grown_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "MAX_LOG_BYTES", 1000)
    log, go_on = tmp_path / "replica.log", tmp_path / "go-on"
    loud = f"""
import os, time
print("a" * 2000, flush=True)
while not os.path.exists({str(go_on)!r}):
    time.sleep(0.01)
print("b", flush=True)
time.sleep(600)
"""

    def until(size: int) -> None:
        end_s = time.monotonic() + 60
        while log.stat().st_size < size:
            assert time.monotonic() < end_s
            time.sleep(0.01)

    with ServerProcess(Script(free_port(), (loud,)), log):
        until(2000)
        local._limit(log)
        assert log.stat().st_size == 0
        assert "a" * 2000 in log.with_suffix(".earlier.log").read_text()
        go_on.touch()
        until(2)
        local._limit(log)
        assert log.read_text() == "b\n", "what follows is written from the beginning on"


class Sleeper(ReplicaSpec):
    """Leaves a child behind when its first process is killed."""

    __slots__ = ()

    def command(self) -> list[str]:
        child = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
        )
        return [sys.executable, "-c", child]


def test_what_a_killed_server_left_behind_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProcess(Sleeper(free_port()), tmp_path / "server.log")
    monkeypatch.setattr(server, "_await_health", lambda waiting, limit_s: None)
    server.start()
    main = psutil.Process(server.pid)
    while not (children := main.children()):
        pass
    main.kill()
    main.wait()
    assert not server.alive and children[0].is_running()
    server.stop()
    assert not children[0].is_running()

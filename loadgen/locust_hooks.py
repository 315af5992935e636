"""Connects runs to Locust's events, command line and web UI."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from adaserve.loadgen.config import BenchConfig, Endpoint, load_config
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.locust_run import LocalRun, MasterRun, WorkerRun
from adaserve.loadgen.results import HEADERS_VARIABLE, new_results_dir
from adaserve.loadgen.web_tab import install_tab

logger = logging.getLogger("adaserve.loadgen")


def add_arguments(parser: Any) -> None:
    group = parser.add_argument_group("SLO load")
    group.add_argument("--bench-config", default="", help="YAML file with classes, arrivals, trace, server")
    group.add_argument("--results", default="", help="Folder for the results (default: results/<UTC>-locust)")
    group.add_argument("--bench-checked", action="store_true", help=SUPPRESS)  # the caller did the preflight
    group.add_argument("--bench-seed", type=int, default=None, help="Seed of the schedule")


def install(environment: Environment) -> None:
    """Sets up this process's role. Exits with code 2 and one sentence when the input is bad."""
    options: Any = environment.parsed_options
    if options.skip_log_setup:
        # Locust's own format carries the name of the machine, and this log stays with the results.
        logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(levelname)s %(name)s: %(message)s")
    if environment.web_ui is None and not options.html_file:
        # Only charts need the history of response times; keeping it stops all streams for milliseconds.
        environment.stats.use_response_times_cache = False
        environment.stats.total.use_response_times_cache = False
    if isinstance(environment.runner, WorkerRunner):
        _Worker(environment).install()
    else:
        _Starter(environment).install()


class _Starter:
    """Local runner or master: plans a run when a test starts."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.run: LocalRun | None = None
        self._number = 0

    def install(self) -> None:
        try:
            self._config()
        except LoadgenError as e:
            fail(e)
        events = self.environment.events
        events.test_start.add_listener(self._on_start)
        events.test_stopping.add_listener(self._on_stopping)
        events.quitting.add_listener(self._on_stopping)  # Locust decides on its exit code right after it
        runner = self.environment.runner
        if isinstance(runner, MasterRunner):
            runner.register_message("adaserve_ready", self._on_ready)
            runner.register_message("adaserve_records", self._on_records)
            runner.register_message("adaserve_done", self._on_done)
        if self.environment.web_ui is not None:
            check_port(self.environment.web_ui.host, self.environment.web_ui.port)
            install_tab(self.environment, lambda: self.run.rows() if self.run else [])

    def _config(self) -> BenchConfig:
        options: Any = self.environment.parsed_options
        config = load_config(options.bench_config) if options.bench_config else BenchConfig()
        if self.environment.host:
            config = config.changed(server=config.server.changed(url=self.environment.host))
        secrets = json.loads(os.environ.get(HEADERS_VARIABLE, "{}"))
        if secrets:
            headers = {**config.server.headers, **secrets}
            config = config.changed(server=config.server.changed(headers=headers))
        if options.bench_seed is not None:
            config = config.changed(seed=options.bench_seed)
        return config

    def _out(self) -> Path:
        options: Any = self.environment.parsed_options
        self._number += 1
        if not options.results:
            return new_results_dir(Path("results"), "locust")
        out = Path(options.results)
        return out if self._number == 1 else out.with_name(f"{out.name}-{self._number}")

    def _on_start(self, **_kwargs: Any) -> None:
        gevent.spawn(self._go)

    def _go(self) -> None:
        headless = self.environment.web_ui is None
        runner = self.environment.runner
        assert runner is not None
        self.environment.process_exit_code = None  # that of the last run counts
        try:
            kind = MasterRun if isinstance(runner, MasterRunner) else LocalRun
            options: Any = self.environment.parsed_options
            self.run = kind(self.environment, self._config(), self._out(), options.bench_checked)
            self.run.start()
        except LoadgenError as e:
            if headless:
                print(f"error: {e}", file=sys.stderr)
            else:
                logger.error("%s", e)  # the web UI shows the log
            self.environment.process_exit_code = 2
        except Exception:
            logger.exception("the run failed")
            self.environment.process_exit_code = 1
        if self.run is not None:
            self.run.abandon()
        if headless:
            # In a greenlet of its own: quitting kills the greenlets of the run, including this one.
            gevent.spawn(runner.quit)
        else:
            gevent.spawn(runner.stop)

    def _on_stopping(self, **_kwargs: Any) -> None:
        if self.run is not None:
            self.run.stop()

    def _master(self) -> MasterRun:
        assert isinstance(self.run, MasterRun)
        return self.run

    def _on_ready(self, msg: Any, **_kwargs: Any) -> None:
        self._master().on_ready(msg.node_id)

    def _on_records(self, msg: Any, **_kwargs: Any) -> None:
        self._master().on_records(msg.data["lines"])

    def _on_done(self, msg: Any, **_kwargs: Any) -> None:
        self._master().on_done(msg.node_id, **msg.data)


class _Worker:
    """Worker: does what the master's messages say."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.run: WorkerRun | None = None

    def install(self) -> None:
        runner = self.environment.runner
        assert isinstance(runner, WorkerRunner)
        runner.register_message("adaserve_begin", self._on_begin)
        runner.register_message("adaserve_rows", self._on_rows)
        runner.register_message("adaserve_go", self._on_go)
        runner.register_message("adaserve_stop", self._on_stop)
        self.environment.events.test_stopping.add_listener(self._on_stop)

    def _on_begin(self, msg: Any, **_kwargs: Any) -> None:
        told = msg.data
        server = Endpoint(**told["server"])
        self.run = WorkerRun(self.environment, server, told["index"], told["expected"])
        self.run.add([])  # its part may be empty

    def _on_rows(self, msg: Any, **_kwargs: Any) -> None:
        assert self.run is not None
        self.run.add(msg.data["rows"])

    def _on_go(self, msg: Any, **_kwargs: Any) -> None:
        assert self.run is not None
        gevent.spawn(self.run.go, msg.data["t0"])

    def _on_stop(self, **_kwargs: Any) -> None:
        if self.run is not None:
            self.run.stop()


def check_port(host: str, port: int) -> None:
    """Exits with one sentence when the web UI could not listen: Locust would print a traceback."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as e:
            why = getattr(e, "strerror", None) or "ports end at 65535"
            fail(LoadgenError(f"the web UI cannot listen on port {port} ({why}): give another --web-port"))


def fail(error: Exception) -> None:
    """Ends the process with one sentence and exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

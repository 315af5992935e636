"""Imports SGLang once and forks a server for every line on stdin.

A server is three processes that each import SGLang, which is nearly all of its start on two cores. Here they
are forked from one process that has imported everything and started nothing. What a server does from its
arguments on is ``python -m sglang.launch_server``, unchanged.

A line is JSON: arguments, environment, log. The answer is the server's process id; its exit is not reported.
Servers end with this process, and this process with its input, also where the tests are killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

from adaserve.host.lifetime import PARENT_ENV, die_with_parent

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
    "transformers.models.auto.tokenization_auto",
    "numba",
)


def serve(request: dict[str, Any], zygote: int) -> None:
    """Becomes a server, which ends with the process ``zygote``. Never returns."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[PARENT_ENV] = str(zygote)
    die_with_parent()
    if os.getppid() != zygote:
        os._exit(1)
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    importlib.invalidate_caches()
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    sys.argv = ["launch_server", *request["arguments"]]
    launch = sys.modules["sglang.launch_server"]
    code = 1
    try:
        launch.load_plugins()
        launch.run_server(launch.prepare_server_args(request["arguments"]))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        launch.kill_process_tree(os.getpid(), include_parent=False)
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    multiprocessing.set_start_method("fork")
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # else every server goes through all of it at its start, several times
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; nobody asks for exit codes
    own = os.getpid()
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(json.loads(line), own)
        print(pid, flush=True)
    os._exit(0)  # nothing here needs an orderly end, and SGLang's modules take their time over it


if __name__ == "__main__":
    main()

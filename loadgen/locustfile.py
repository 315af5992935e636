"""Open-loop load with per-class SLOs: ``locust -f loadgen/locustfile.py --host http://127.0.0.1:30000``.

Headless, with the web UI, with ``--processes`` or as master and workers. Options of its own: ``--bench-config
FILE`` (YAML: classes, arrivals, trace, ...), ``--bench-seed N``, ``--results DIR``. Users and spawn rate do
not matter: the schedule decides what is sent when.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import gevent
from locust import User, events, task

if sys.flags.safe_path and os.getcwd() in sys.path:
    # Locust puts the working directory first. In the repository's root its folder adaserve/, which may lack
    # the load generator, would be found before the installed package.
    sys.path.remove(os.getcwd())

from adaserve.loadgen import locust_hooks


class OpenLoopLoad(User):
    """Keeps Locust's test alive; the requests are dispatched beside it."""

    @task
    def wait(self) -> None:
        gevent.sleep(1)


@events.init_command_line_parser.add_listener
def _(parser: Any) -> None:
    locust_hooks.add_arguments(parser)


@events.init.add_listener
def _(environment: Any, **_kwargs: Any) -> None:
    locust_hooks.install(environment)

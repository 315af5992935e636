"""Runs SGLang's server so that it can be stopped while it starts: python -m adaserve.launch MODULE ARGUMENTS.

SGLang's tools that start an engine themselves load no plugins before they read their flags, so that they know
no ADASERVE. Here they do.

SGLang heeds signals once it serves. Until then, for half a minute, Ctrl-C ended in a traceback of each of its
processes, in whatever line they were. Settings that cannot be served ended in a traceback as well, and with
another SGLang it knew no ADASERVE, and did not say why.
"""

from __future__ import annotations

import os
import runpy
import sys
from traceback import walk_tb

from adaserve.host.signals import stop_cleanly

SETTINGS = "sglang.srt.arg_groups."
"""SGLang's modules that look at settings before it starts anything."""


def is_of_settings(error: Exception) -> bool:
    """Whether SGLang refuses settings by it: there, or in what is asked from there, such as a model."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return any(name.startswith(SETTINGS) for name in names) and not names[-1].startswith("adaserve.")


if __name__ == "__main__":
    stop_cleanly()
    from adaserve.errors import UserError
    from adaserve.host.lifetime import die_with_parent
    from adaserve.host.processes import end_children, remove_leftovers, require_room
    from adaserve.sglang_compat import require_sglang

    die_with_parent()  # our plugin does it, too, but SGLang is imported first
    remove_leftovers()
    del sys.argv[0]
    try:
        require_room()
        require_sglang()
        if sys.argv[0].startswith("sglang."):
            from sglang.srt.plugins import load_plugins

            load_plugins()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except (UserError, ValueError, OSError, AssertionError, NotImplementedError) as error:
        if not isinstance(error, UserError) and not (str(error) and is_of_settings(error)):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    finally:
        end_children(os.getpid())  # SGLang ends them, too, but leaves their shared memory

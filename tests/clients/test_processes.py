"""The processes of a served model."""

from __future__ import annotations

from pathlib import Path

import psutil

from adaserve.server import ServerProcess

_FORKED_AND_NOTHING_ELSE = 0x40  # PF_FORKNOEXEC in Linux: a process that runs what it was forked from


def test_scheduler_and_detokenizer_are_forked(server: ServerProcess) -> None:
    """They would import SGLang and PyTorch anew otherwise."""
    flags = {}
    for process in psutil.Process(server.pid).children():
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        flags[process.name()] = int(stat.rpartition(")")[2].split()[6])
    forked = {name for name, value in flags.items() if value & _FORKED_AND_NOTHING_ELSE}
    assert forked == {"sglang::scheduler", "sglang::detokenizer"}, flags

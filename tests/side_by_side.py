"""How tests are dealt out to the processes that run them side by side (``make test``)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

SHARED = ("tests/engine", "tests/clients")
"""Folders whose files share servers. Each folder is one process's."""


def share_of(nodeid: str) -> str:
    """The tests that one process runs: those of a file, or of a folder that shares servers."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in SHARED else file


class ByServers(LoadScopeScheduling):  # type: ignore[misc]
    """Shares are taken in the order in which tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)

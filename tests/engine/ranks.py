"""Tensor-parallel ranks in one process: asked one after the other, the first one first."""

from __future__ import annotations

from typing import Any

from adaserve.engine.rank_sync import RankSync


class Group:
    """What ``RankSync`` needs of SGLang's ``GroupCoordinator``. ``sent``: what the first rank has said
    and the others have not heard yet."""

    def __init__(self, rank: int = 0, size: int = 1, sent: list[Any] | None = None) -> None:
        self.rank_in_group, self.world_size = rank, size
        self._sent = [] if sent is None else sent

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.rank_in_group != src:
            return self._sent.pop(0)
        self._sent.append(obj)
        return obj


ALONE = RankSync(Group())
"""Of a server with a single rank, which tells nobody."""

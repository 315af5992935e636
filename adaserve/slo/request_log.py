"""Finished requests as a trace, for ``adaserve simulate capacity`` and ``adaserve bench serve``."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

from adaserve.slo.classes import CUSTOM_CLASS, DEFAULT_CLASS, to_ms
from adaserve.slo.events import FinishedRequest
from adaserve.slo.trace import TraceRow, to_jsonl

logger = logging.getLogger(__name__)


class RequestLog:
    """Appends one line of the project's trace format per request: lengths and SLOs, never a text.

    Timestamps are epoch time. Several servers may write to one file: a line is one write.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._failed = False

    def add(self, request: FinishedRequest, arrival_s: float, prompt_tokens: int) -> None:
        """``arrival_s``: by the clock of ``time.perf_counter``."""
        if self._failed:
            return
        slo = request.slo
        named = slo.slo_class not in (CUSTOM_CLASS, DEFAULT_CLASS)
        row = TraceRow(
            arrival_s=time.time() - (time.perf_counter() - arrival_s),
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, request.output_tokens),
            slo_class=slo.slo_class if named else None,
            slo_tpot_ms=to_ms(slo.tpot_s),
            slo_ttft_ms=to_ms(slo.ttft_s),
        )
        try:
            self._write("".join(to_jsonl([row])).encode())
        except OSError as error:  # a full disk must not end the server
            self._failed = True
            logger.warning("AdaServe: requests are no longer recorded: %s", error)

    def _write(self, line: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

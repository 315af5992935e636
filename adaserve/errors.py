"""Errors that a person sees as one sentence, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was asked for, a host or a server is the cause; the message says what to do."""


def why_no_answer(error: Exception) -> str:
    """What went wrong, in one line: some of httpx's errors have several, some only their name."""
    return (str(error).splitlines() or [""])[0].strip() or type(error).__name__

"""The one exception that a user of the load generator sees."""

from __future__ import annotations

from adaserve.errors import UserError


class LoadgenError(UserError, ValueError):
    """Bad input or a server that cannot be used; the text says what to do. Exit code 2."""


def why_unreadable(error: Exception) -> str:
    """Why a text file could not be read, in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return str((isinstance(error, OSError) and error.strerror) or error)

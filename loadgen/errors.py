"""The one exception that a user of the load generator sees."""

from __future__ import annotations

from adaserve.errors import UserError


class LoadgenError(UserError, ValueError):
    """Bad input or a server that cannot be used; the text says what to do. Exit code 2."""

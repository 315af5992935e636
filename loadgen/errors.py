"""The one exception that a user of the load generator sees."""

from __future__ import annotations


class LoadgenError(ValueError):
    """Bad input or a server that cannot be used; the text says what to do. Exit code 2."""

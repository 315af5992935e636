"""The command ``adaserve``: until its own modules are imported, an interruption ends it silently."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(128 + number))
    from adaserve.cli import main

    main()


if __name__ == "__main__":
    main()

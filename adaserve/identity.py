"""Who we are to SGLang: the algorithm's name, the version we hook into, and whether we could register."""

from __future__ import annotations

from dataclasses import dataclass

NAME = "ADASERVE"

SGLANG_VERSION = "0.5.23"
"""What our hooks fit; ``pyproject.toml`` asks for the same."""


@dataclass
class Registration:
    """Why this process could not register with SGLang; None where it could, or has not tried."""

    failure: BaseException | None = None


registration = Registration()


def ensure_registered() -> None:
    """Raises RuntimeError with what went wrong in ``adaserve.plugin.register``.

    SGLang only logs a plugin's failure and would serve without its hooks."""
    if registration.failure is not None:
        raise RuntimeError(
            "AdaServe could not be registered with SGLang; see the cause above"
        ) from registration.failure

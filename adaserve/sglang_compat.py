"""AdaServe's identity for SGLang: the algorithm's name, the version we hook into, and whether we could
register."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from adaserve.errors import UserError

NAME = "ADASERVE"

SGLANG_VERSION = "0.5.23"
"""What our hooks fit; ``pyproject.toml`` asks for the same."""


class PatchError(UserError, RuntimeError):
    """SGLang is not as AdaServe's hooks expect it: wrong version."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. AdaServe was made for sglang {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}"
        )


def require_sglang() -> None:
    """Asked before anything is imported from SGLang, since another one may have moved whatever we import.

    Raises PatchError."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise PatchError("SGLang is not installed") from error
    if found != SGLANG_VERSION:
        raise PatchError(f"This is sglang {found}")


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

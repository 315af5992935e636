"""Prints the installed version of everything that the project needs, directly or not: constraints.txt."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from env import requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = """\
# Versions that AdaServe's tests passed with (Linux x86-64, Python 3.11). `make pins` writes this file.
# The environment is made with them; a package that somebody installs adaserve into is free to differ.
"""


def closure(roots: list[str]) -> dict[str, str]:
    """Name and version of the requirements and of theirs."""
    found: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    pending = [(Requirement(r), "") for r in roots]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # optional there, or replaced by a package of another name
        found[name] = installed.version
        for wanted in ("", *sorted(requirement.extras)):
            if (name, wanted) not in visited:
                visited.add((name, wanted))
                pending += [(Requirement(r), wanted) for r in installed.requires or ()]
    return found


def main() -> None:
    pins = closure(requirements())
    print(HEADER + "\n".join(f"{name}=={version}" for name, version in sorted(pins.items())))


if __name__ == "__main__":
    main()

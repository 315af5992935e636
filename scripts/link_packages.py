"""Lays the packages out as they are imported, in a folder of links.

The folders scheduler/, patches/ and loadgen/ are imported as adaserve.scheduler and so on. Python and
setuptools know how to map them, the type checker and the import linter do not. Usage: link_packages.py FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(tree: Path) -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders: dict[str, str] = setuptools["package-dir"]
    for package in setuptools["packages"]:
        if package in folders:
            # Unchanged links keep the type checker's cache; packages that are gone must not stay.
            shutil.rmtree(tree / package.replace(".", "/"), ignore_errors=True)
    for package, folder in sorted(folders.items()):
        link_modules(ROOT / folder, tree / package.replace(".", "/"))


def link_modules(source: Path, target: Path) -> None:
    for module in source.rglob("*.py"):
        link = target / module.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(module, link.parent))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

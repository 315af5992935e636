#!/usr/bin/env python3
"""Checks the parts beside this file, puts the wheels together again and unpacks them into one folder.

Needs nothing but the standard library. The folder goes on PYTHONPATH; entry points are found in it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import stat
import sys
import zipfile
from pathlib import Path


class AssemblyError(Exception):
    """The parts are not what the manifest says; the message says which."""


def joined(folder: Path, manifest: dict) -> bytes:
    """All parts, one behind another. Raises AssemblyError for a missing or damaged one."""
    found = []
    for part in manifest["parts"]:
        path = folder / part["name"]
        if not path.is_file():
            raise AssemblyError(f"{part['name']} is missing: bring it to {folder}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise AssemblyError(f"{part['name']} is damaged ({len(data)} bytes): bring it again")
        found.append(data)
    return b"".join(found)


def assemble(folder: Path, to: Path, keep_wheels: bool) -> list[str]:
    """Unpacks every wheel into ``to``; names of the wheels. Raises AssemblyError."""
    manifest = json.loads((folder / "manifest.json").read_text())
    whole = joined(folder, manifest)
    to.mkdir(parents=True, exist_ok=True)
    for file in manifest["files"]:
        data = whole[file["offset"] : file["offset"] + file["bytes"]]
        if hashlib.sha256(data).hexdigest() != file["sha256"]:
            raise AssemblyError(f"{file['name']} does not come together: build the bundle again")
        if keep_wheels:
            (folder / file["name"]).write_bytes(data)
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            unpack(wheel, to)
    return [file["name"] for file in manifest["files"]]


def unpack(wheel: zipfile.ZipFile, to: Path) -> None:
    """A wheel's files, those of its data folder for site-packages included, with their permissions."""
    for item in wheel.infolist():
        parts = Path(item.filename).parts
        if ".." in parts or item.filename.startswith("/"):
            raise AssemblyError(f"a wheel wants to write to {item.filename}")
        if parts[0].endswith(".data"):
            if len(parts) < 3 or parts[1] not in ("purelib", "platlib"):
                continue  # scripts and headers: PYTHONPATH knows neither
            parts = parts[2:]
        target = to.joinpath(*parts)
        if item.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(item))
        if mode := stat.S_IMODE(item.external_attr >> 16):
            os.chmod(target, mode | stat.S_IRUSR | stat.S_IWUSR)


def fits(target: dict) -> list[str]:
    """What about this host differs from what the bundle was made for."""
    here = {"python": "{}.{}".format(*sys.version_info), "machine": platform.machine()}
    try:
        from importlib.metadata import version

        here["torch"] = version("torch")
    except Exception:
        here["torch"] = "none"
    # A package may leave out of its version what it was built for.
    same = {k: (v, v.partition("+")[0]) for k, v in target.items()}
    return [f"{k}: {here[k]} here, made for {target[k]}" for k in here if here[k] not in same[k]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("site"), help="folder for PYTHONPATH")
    parser.add_argument("--keep-wheels", action="store_true", help="also write the wheels, for pip install")
    given = parser.parse_args()
    folder = Path(__file__).resolve().parent
    try:
        for line in fits(json.loads((folder / "manifest.json").read_text())["target"]):
            print(f"note: {line}", file=sys.stderr)
        names = assemble(folder, given.to, given.keep_wheels)
    except (AssemblyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(names)} wheels in {given.to}. Now:\n")
    # PYTHONSAFEPATH: in the repository's root its folder adaserve/, which lacks the scheduler, would be found
    # before the installed package.
    print(f"  export PYTHONSAFEPATH=1 PYTHONPATH={given.to.resolve()}")
    # SGLang asks for a newer sglang-kernel, which needs torch 2.14. Its compiled radix tree does, too, and
    # misreads the tensors of 2.11 without saying so.
    print("  export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python")
    print("  python3 -m adaserve.cli doctor")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Builds what a GPU host without network needs: wheels, in parts small enough to be carried one by one.

    python scripts/gpu_bundle.py list                    # what would be fetched and left out; no network
    python scripts/gpu_bundle.py build                   # here, with network: gpu-bundle/
    python3 gpu-bundle/assemble.py --to site             # there, after all parts have arrived
    PYTHONSAFEPATH=1 PYTHONPATH=site python3 -m adaserve.cli serve ...

Wheels are fetched through pip as it is configured, for the platform in ``TARGET``. Three large ones are
slimmed of what a server never reads. A manifest names every wheel and part with its SHA-256.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART_BYTES = 31 << 20
"""With the repository itself a part fits a transfer of 64 MiB; a test adds them up. Each lies in a
folder of its own, which git ignores, so that parts can be carried one by one."""

TARGET = {"python": "3.12", "torch": "2.11.0+cu130", "cuda": "13", "machine": "x86_64"}
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]

SLIM = {
    "sglang": ("sglang/test/*", "sglang/benchmark/*", "sglang/bench_*", "sglang/srt/rust_extensions/*.so",
               "sglang/multimodal_gen/*"),
    # The kernels of a Llama are compiled from csrc/ itself.
    "flashinfer_python": ("flashinfer/data/csrc/*/*", "flashinfer/data/cutlass/examples/*",
                          "flashinfer/data/cutlass/python/*", "flashinfer/data/cutlass/test/*",
                          "flashinfer/fused_moe/backends/cudnn_frost/artifacts/*"),
    "sglang_kernel": ("sgl_kernel/flash_ops*", "sgl_kernel/sm100/*", "sgl_kernel/spatial_ops*",
                      "sgl_kernel/*flashmla*", "sgl_kernel/infllm_ops*"),
}  # fmt: skip
"""Patterns of files left out, by distribution."""


KERNELS_WHEEL = "adaserve_gpu_kernels-1-py3-none-any.whl"

NOT_SOURCE = (".*", "build", "dist", "results", "tests", "*.egg-info", "__pycache__", "gpu-bundle")
"""What a wheel is not made of."""


class BundleError(Exception):
    """The bundle cannot be made; the message says what to do."""


def requirements(listed: Path, constraints: Path) -> list[str]:
    """``name==version`` of every wheel. Raises BundleError for a name without a version."""
    pins = {}
    for line in constraints.read_text().splitlines():
        name, _, version = line.partition("==")
        pins[name.strip().lower()] = version.split(";")[0].strip()
    wanted = []
    for line in listed.read_text().splitlines():
        name = line.partition("#")[0].strip()
        if not name:
            continue
        if "==" not in name:
            if name.lower() not in pins:
                raise BundleError(f"{name} has no version in {constraints.name}: pin it in {listed.name}")
            name = f"{name}=={pins[name.lower()]}"
        wanted.append(name)
    return wanted


def download(wanted: Sequence[str], folder: Path) -> None:
    """Every wheel for the target, without its dependencies. Raises BundleError with pip's reason."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    pip += ["--implementation", "cp", "--python-version", TARGET["python"]]
    pip += [word for platform in PLATFORMS for word in ("--platform", platform)]
    for number, name in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {name}", flush=True)
        done = subprocess.run([*pip, name], check=False, capture_output=True, text=True)
        if done.returncode:
            raise BundleError(f"pip found no wheel of {name} for the target:\n{done.stderr.strip()[-600:]}")


def own_wheel(folder: Path) -> None:
    """The wheel of this working tree, built from a copy: setuptools leaves its traces where it builds."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "adaserve"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_SOURCE))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--wheel-dir", str(folder), str(tree)], check=False, capture_output=True, text=True
        )
    if done.returncode:
        raise BundleError(f"the wheel of AdaServe could not be built:\n{done.stderr.strip()[-600:]}")


def unmatched(patterns: Sequence[str], files: Sequence[str]) -> list[str]:
    """Patterns that none of ``files`` matches."""
    return [p for p in patterns if not fnmatch.filter(files, p)]


def slim(wheel: Path, patterns: Sequence[str]) -> int:
    """Rewrites a wheel without the files that match, its RECORD kept true; bytes saved."""
    before = wheel.stat().st_size
    partial = wheel.with_suffix(".partial")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        if unused := unmatched(patterns, old.namelist()):
            print(f"note: {wheel.name} has no {', '.join(unused)}", file=sys.stderr)
        kept = [i for i in old.infolist() if not any(fnmatch.fnmatch(i.filename, p) for p in patterns)]
        names = {i.filename for i in kept}
        for item in kept:
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                rows = data.decode().splitlines()
                data = "".join(
                    f"{row}\n" for row in rows if row.rsplit(",", 2)[0].strip('"') in names
                ).encode()
            new.writestr(item, data, zipfile.ZIP_DEFLATED)
    partial.replace(wheel)
    return before - wheel.stat().st_size


def split(wheels: Sequence[Path], out: Path, part_bytes: int = PART_BYTES) -> dict[str, object]:
    """Writes the wheels' bytes into parts of at most ``part_bytes``, and the manifest, which it returns."""
    files, joined, parts = [], bytearray(), []
    for wheel in sorted(wheels):
        data = wheel.read_bytes()
        files.append({"offset": len(joined), **described(wheel.name, data)})
        joined += data
    for start in range(0, len(joined), part_bytes):
        name, data = f"part-{len(parts):03}/data", bytes(joined[start : start + part_bytes])
        (out / name).parent.mkdir(parents=True)
        (out / name).write_bytes(data)
        parts.append(described(name, data))
    manifest: dict[str, object] = {
        "schema_version": 1,
        "target": TARGET,
        "bytes": len(joined),
        "parts": parts,
        "files": files,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(ROOT / "scripts" / "gpu_assemble.py", out / "assemble.py")
    return manifest


def described(name: str, data: bytes) -> dict[str, object]:
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def kernels_wheel(folder: Path) -> None:
    """FlashInfer's kernels where FlashInfer looks for compiled ones, as a wheel. Raises BundleError."""
    deflated = zipfile.ZipFile(folder / KERNELS_WHEEL, "w", zipfile.ZIP_DEFLATED, compresslevel=9)
    with tempfile.TemporaryDirectory() as name, deflated as wheel:
        made = Path(name)
        command = [sys.executable, "-m", "adaserve.bench.gpu_check.flashinfer_kernels", "--out", name]
        done = subprocess.run(command, check=False, cwd=name)
        if done.returncode:
            raise BundleError("kernels could not be compiled here (see above): leave --kernels out")
        for library in sorted(made.glob("*/*.so")):
            wheel.write(library, f"flashinfer/data/aot/{library.parent.name}/{library.name}")


def build(out: Path, only: str | None, kernels: bool) -> None:
    wanted = requirements(ROOT / "scripts" / "gpu_bundle.txt", ROOT / "constraints.txt")
    if only is not None:
        wanted = [w for w in wanted if w.partition("==")[0] in only.split(",")]
    if out.exists() and any(out.iterdir()):
        raise BundleError(f"{out} is not empty: give another folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download(wanted, folder)
        own_wheel(folder)
        if kernels:
            print("compiling kernels (about eight minutes on two cores)", flush=True)
            kernels_wheel(folder)
        for wheel in sorted(folder.glob("*.whl")):
            if patterns := SLIM.get(wheel.name.partition("-")[0].lower()):
                saved = slim(wheel, patterns)
                print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {saved / 1e6:.1f} MB left out")
        manifest = split(list(folder.glob("*.whl")), out)
    parts = manifest["parts"]
    assert isinstance(parts, list)
    print(
        f"{len(wanted) + 1 + kernels} wheels in {len(parts)} parts below {out}\n"
        f"on the GPU host: python3 {out.name}/assemble.py --to site, or scripts/gpu_stages.sh"
    )


def show() -> None:
    """Prints every wheel, and what is left out of those of the three large ones that are installed here."""
    wanted = requirements(ROOT / "scripts" / "gpu_bundle.txt", ROOT / "constraints.txt")
    for requirement in wanted:
        print(requirement)
        name, _, version = requirement.partition("==")
        patterns = SLIM.get(name.replace("-", "_").lower())
        if patterns is None:
            continue
        try:
            here = distribution(name)
        except PackageNotFoundError:
            print("    not installed here: what is left out cannot be told")
            continue
        note = "" if here.version == version else f" (of {here.version}, which is installed)"
        files = [str(f) for f in here.files or ()]
        for pattern in patterns:
            found = [Path(here.locate_file(f)) for f in fnmatch.filter(files, pattern)]
            size = sum(f.stat().st_size for f in found if f.is_file())
            print(f"    without {pattern}: {len(found)} files, {size / 1e6:.1f} MB{note}")
    print(f"{len(wanted)} wheels and AdaServe's own, for {TARGET}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="fetch, slim and split")
    building.add_argument("--out", type=Path, default=Path("gpu-bundle"))
    building.add_argument("--only", help="comma-separated names: a small bundle, to try it")
    building.add_argument(
        "--kernels", action="store_true", help="also FlashInfer's, compiled here with nvcc 13"
    )
    commands.add_parser("list", help="what would be fetched and left out, without network")
    given = parser.parse_args()
    try:
        if given.command == "list":
            show()
        else:
            build(given.out, given.only, given.kernels)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What `pip install adaserve` delivers: all of our modules and data, under one import name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaserve import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"adaserve": "adaserve", "scheduler": "adaserve/scheduler", "loadgen": "adaserve/loadgen",
           "patches": "adaserve/patches"}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git would deliver."""
    names = shipped()
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for name in names:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(work.glob("adaserve-*.whl"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    """The names in it."""
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def shipped() -> list[str]:
    """Files that are tracked, or would be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [name for name in out.split("\0") if name and (ROOT / name).is_file()]


def test_every_file_of_our_packages(wheel: set[str]) -> None:
    wanted = {
        FOLDERS[top] + "/" + rest
        for name in shipped()
        for top, _, rest in [name.partition("/")]
        if top in FOLDERS
    }
    missing = sorted(wanted - wheel)
    assert not missing, f"add them to packages or package-data in pyproject.toml: {missing}"


def test_every_pattern_of_data_files_finds_one() -> None:
    """Else the file that it names was forgotten, as a type checker's py.typed once was."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, patterns in setuptools["package-data"].items():
        folder = setuptools["package-dir"].get(package, package.replace(".", "/"))
        for pattern in patterns:
            assert [*(ROOT / folder).glob(pattern)], f"{package}: {pattern}"


def test_one_import_name(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"adaserve"}


def test_entry_points(wheel: set[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["scripts"].values(), *(v for g in project["entry-points"].values() for v in g.values())]
    for value in named:
        module = value.partition(":")[0].replace(".", "/") + ".py"
        assert module in wheel, f"entry point {value} has no module"


def test_what_only_measures_is_an_extra(built: Path) -> None:
    """A server is installed without the load generator's and the figures' libraries."""
    with zipfile.ZipFile(built) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*(?:; extra == \"(\w+)\")?$", metadata, re.MULTILINE)
    of = {extra: {name for name, e in needed if e == extra} for extra in ("", "bench", "dev")}
    assert of["bench"] == set(cli.EXTRA)
    assert "sglang" in of[""] and not of[""] & (of["bench"] | of["dev"])


def test_a_missing_extra_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "locust" else True)
    done = CliRunner().invoke(cli.app, ["demo"])
    assert done.exit_code == 2
    assert done.stderr == "error: adaserve demo needs locust: pip install 'adaserve[bench]'\n"


def test_a_clone_has_all_packages_where_it_hides_the_installed_ones(built: Path) -> None:
    """As for `python -m sglang.launch_server` in the folder of a clone, after `pip install .`."""
    names = ["adaserve.scheduler", "adaserve.patches", "adaserve.loadgen"]
    code = f"import importlib.util as u; print([u.find_spec(n) is not None for n in {names}])"
    source = built.parent / "source"
    out = subprocess.check_output([sys.executable, "-S", "-c", code], cwd=source, env={}, text=True)
    assert out.strip() == "[True, True, True]"


def test_bare_folders_are_no_modules(tmp_path: Path) -> None:
    names = ["scheduler", "patches", "loadgen"]
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"

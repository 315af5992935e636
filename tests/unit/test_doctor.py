"""The doctor's checks on hosts that we make up."""

from __future__ import annotations

import json
import resource
import socket
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adaserve import doctor, patches
from adaserve.config import AdaServeConfig
from adaserve.engine.costs import cost_cache
from adaserve.errors import UserError
from adaserve.scheduler.costs.profile import Profile


def test_python() -> None:
    assert doctor.check_python((3, 11))[0].state == "ok"
    assert doctor.check_python((3, 13))[0].state == "note"


def test_sglang_of_another_version_names_the_remedy() -> None:
    (finding,) = doctor.check_sglang("0.5.22")
    assert finding.state == "missing" and "pip install sglang==0.5.23" in finding.remedy


def test_cpu_features() -> None:
    (finding,) = doctor.check_cpu("processor: 0\nflags\t: sse avx2 f16c avx512_bf16 amx_bf16\n")
    assert finding.state == "ok" and finding.found.endswith("AVX2, F16C, AVX-512 BF16, AMX BF16")
    assert doctor.check_cpu("nothing we know")[0].state == "note"


def test_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_memory(4 * 2**30)[0].state == "note"
    monkeypatch.setattr(doctor, "NEEDED_DISK_GB", 1e9)
    assert doctor.check_disk(tmp_path / "not" / "there")[0].state == "missing"


def test_a_low_limit_of_open_files_is_named() -> None:
    found = {most: doctor.check_open_files(most)[0].state for most in (256, 65536, resource.RLIM_INFINITY)}
    assert list(found.values()) == ["note", "ok", "ok"]


def test_memory_that_a_container_may_not_have_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_memory", lambda: int(7.8 * 2**30))
    (finding,) = doctor.check_memory()
    assert (finding.state, finding.found) == ("note", "7.8 GiB"), "rounded it would say that 8 are enough"


@pytest.mark.parametrize("place", [".", "pair"])
def test_a_cache_that_cannot_be_written_to(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers use what is there. Without the widened pair the demo cannot start."""
    (tmp_path / "pair").mkdir()
    assert doctor.check_disk(tmp_path)[0].state == "ok"
    closed = tmp_path / place
    monkeypatch.setattr(
        doctor.os, "access", lambda path, _: path != closed
    )  # the superuser may write anywhere
    (finding,) = doctor.check_disk(tmp_path)
    assert finding.state == "missing" and finding.found == f"{closed} cannot be written to"
    assert "XDG_CACHE_HOME" in finding.remedy
    (tmp_path / "pair" / "target-1").mkdir()
    (tmp_path / "pair" / "target-1" / "config.json").touch()
    assert doctor.check_disk(tmp_path)[0].state == "note"


def test_a_cache_below_a_folder_of_somebody_else(tmp_path: Path, forbidden: Path) -> None:
    (finding,) = doctor.check_disk(forbidden / "cache" / "adaserve")
    assert finding.state == "missing" and finding.found == f"{forbidden} cannot be written to"


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert doctor.check_port(taken.getsockname()[1])[0].state == "note"


def test_a_gpu_host_is_asked_for_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor.check_cuda_toolkit(on_gpu=False) == []
    (finding,) = doctor.check_cuda_toolkit(on_gpu=True)
    assert finding.state == "note" and "CUDA_HOME" in finding.remedy
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert doctor.check_cuda_toolkit(on_gpu=True)[0].state == "ok"


def test_hidden_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.healthy(doctor.check_entry_points())
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert not doctor.healthy(doctor.check_entry_points())


@pytest.mark.parametrize(
    ("variable", "value", "on_cpu", "remedy"),
    [
        ("SGLANG_PLUGINS", "adaserve", True, "add adaserve_cpu to it, or unset it"),
        ("SGLANG_PLUGINS", "another, adaserve_cpu", True, "add adaserve to it, or unset it"),
        ("SGLANG_PLUGINS", "adaserve, adaserve_cpu", True, None),
        ("SGLANG_PLUGINS", "adaserve", False, None),
        ("SGLANG_PLATFORM", "another", True, "set it to adaserve_cpu, or unset it"),
        ("SGLANG_PLATFORM", "adaserve_cpu", True, None),
        ("SGLANG_PLATFORM", "adaserve_cpu", False, "unset it"),
        ("SGLANG_USE_CPU_ENGINE", "1", False, "unset it"),
        ("SGLANG_USE_CPU_ENGINE", "0", True, None),
    ],
)
def test_what_hides_the_plugin_or_the_platform_is_named(
    variable: str, value: str, on_cpu: bool, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes platforms by the names in SGLANG_PLUGINS, too, and from one package all or nothing."""
    monkeypatch.setenv(variable, value)
    missing = [f.remedy for f in doctor.check_entry_points(on_cpu) if f.state == "missing"]
    assert missing == ([] if remedy is None else [remedy])


@pytest.mark.parametrize(("variable", "value"), [("SGLANG_PLATFORM", "cuda"), ("SGLANG_USE_CPU_ENGINE", "1")])
def test_what_follows_from_a_platform_that_is_not_there_is_not_said_too(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert doctor.check_engine() == []


def test_an_sglang_that_does_not_load_is_not_called_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", None)
    (finding,) = doctor.check_engine()
    assert finding.state == "missing" and "import of sglang.srt.managers.scheduler" in finding.found


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (PermissionError(13, "Permission denied", "/home/somebody"), "/home/somebody: Permission denied"),
        (FileNotFoundError(2, "No temporary folder"), "No temporary folder: set TMPDIR"),
    ],
)
def test_folders_that_cannot_be_written_to_are_no_fault_of_sglang(
    error: OSError, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes some when it is imported."""

    def apply_all() -> None:
        raise error

    monkeypatch.setattr(patches, "targets", [])
    monkeypatch.setattr(patches, "apply_all", apply_all)
    (finding,) = doctor.examine([doctor.check_engine])
    assert finding.found.startswith(found) and not finding.remedy


@pytest.mark.parametrize("value", ['{"policy": ', '{"policy": "fastest"}'])
def test_settings_that_no_server_takes(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADASERVE_CONFIG", raising=False)
    assert doctor.check_settings() == []
    monkeypatch.setenv("ADASERVE_CONFIG", value)
    (finding,) = doctor.check_settings()
    assert finding.state == "missing" and "ADASERVE_CONFIG" in finding.remedy
    monkeypatch.setenv("ADASERVE_CONFIG", '{"policy": "none"}')
    assert doctor.check_settings()[0].state == "ok"


def test_profiles(tmp_path: Path) -> None:
    """One counts that a server here would use, which is found by what it was measured with."""
    assert doctor.check_profile(tmp_path)[0].found.startswith("none")
    (tmp_path / "damaged.json").write_text("{}")
    args = SimpleNamespace(**dict.fromkeys(cost_cache._OF_SERVER), model_path="target")
    here = cost_cache.cache_key((), AdaServeConfig(), args)
    points = np.array([[1.0, 256.0, 1.0, 0.01]])
    for name, changed in (("cpu", {"host": "another"}), ("torch", {"torch": "2.0.0"})):
        Profile(points, points, meta=here | changed).save(tmp_path / f"{name}.json")
    (finding,) = doctor.check_profile(tmp_path)
    assert (finding.state, finding.found) == ("note", "3, of other hosts or versions")
    Profile(points, points, meta=here).save(tmp_path / "here.json")
    (finding,) = doctor.check_profile(tmp_path)
    assert (finding.state, finding.found) == ("ok", "here.json")


def test_a_check_that_breaks_is_a_finding() -> None:
    def check_broken() -> list[doctor.Finding]:
        raise ImportError("no such library")

    def check_host() -> list[doctor.Finding]:
        raise UserError("no home: set XDG_CACHE_HOME")

    findings = doctor.examine([check_broken, check_host, lambda: [doctor.Finding("x", "ok", "y")]])
    assert [f.state for f in findings] == ["missing", "missing", "ok"]
    assert "no such library" in findings[0].found
    assert "pip install adaserve" not in findings[0].remedy, "the package index has none of that name from us"
    assert (findings[1].found, findings[1].remedy) == ("no home: set XDG_CACHE_HOME", "")


def test_the_report_is_nothing_but_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    def examine() -> list[doctor.Finding]:
        warnings.warn("Only CUDA supports this", stacklevel=1)
        return [doctor.Finding("Port", "missing", "found", "pip install 'adaserve[bench]'")]

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.doctor() == 3
    assert "adaserve[bench]" in capsys.readouterr().out and not recwarn.list


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("missing", 3)])
def test_report(
    state: doctor.State, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("Port", state, "found", "do this")])
    assert doctor.doctor(json_output=True) == code
    assert json.loads(capsys.readouterr().out)["findings"][0]["remedy"] == "do this"
    assert doctor.doctor() == code
    assert "do this" in capsys.readouterr().out


def test_a_path_stays_whole_where_nobody_sees_the_lines_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/folder/" + "with/many/folders/" * 9 + "python"
    found = [doctor.Finding("Python", "ok", f"3.11 at {path}", "nothing")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor.doctor() == 0
    assert path in capsys.readouterr().out

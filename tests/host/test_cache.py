"""Where the cache lies, for users of all kinds."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from adaserve.errors import UserError
from adaserve.host.cache import cache_folder, lead_libraries


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user without a name has, in a container."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "SGLANG_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # whatever a test sets is taken back
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_folder_names_one() -> None:
    lead_libraries()
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        cache_folder()


@pytest.mark.usefixtures("no_home")
def test_sglang_and_its_libraries_follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lead_libraries()
    assert cache_folder() == tmp_path / "adaserve"
    assert os.environ["SGLANG_CACHE_DIR"] == str(tmp_path / "adaserve" / "sglang")
    assert Path.home() == tmp_path
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/elsewhere")
    lead_libraries()
    assert (os.environ["HOME"], os.environ["SGLANG_CACHE_DIR"]) == ("/somewhere", "/elsewhere")

"""Files that are replaced: never half of one, and nothing that is no file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from adaserve.bench.jsonl import append_line, read_lines
from adaserve.host.files import write_atomically, write_json


def test_a_write_that_breaks_off_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"blocks": ["é"]})
    with monkeypatch.context() as killed:

        def broken(self: Path, data: bytes) -> int:
            with self.open("wb") as file:
                file.write(data[: len(data) // 2])
            raise KeyboardInterrupt

        killed.setattr(Path, "write_bytes", broken)
        with pytest.raises(KeyboardInterrupt):
            write_json(path, {"blocks": [1, 2, 3]})
    assert path.read_text(encoding="utf-8") == '{\n "blocks": [\n  "é"\n ]\n}\n'
    assert list(tmp_path.iterdir()) == [path], "no part is left"
    write_json(path, [1])
    assert json.loads(path.read_text()) == [1]


def test_two_writers_of_one_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes while the first one has its part ready."""
    path, replace = tmp_path / "result.json", os.replace
    first, second = b"1" * 9, b"2" * 99

    def late(part: Path, to: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_atomically(path, second)
        assert path.read_bytes() == second
        replace(part, to)

    monkeypatch.setattr(os, "replace", late)
    write_atomically(path, first)
    assert path.read_bytes() == first and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_of_its_own_is_written_to(tmp_path: Path) -> None:
    """As /dev/stdout, a link to a pipe or a terminal: a result would lie in its place, and nobody see it."""
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("earlier")
    link.symlink_to(there)
    write_atomically(link, b"new")
    assert link.is_symlink() and there.read_bytes() == b"new"


def test_a_full_disk_is_named_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b"old")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a file that is open already

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="result"):
        write_atomically(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"] and path.read_bytes() == b"old"


def test_a_line_of_json_may_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    path, lines = tmp_path / "cases.jsonl", [{"id": 1, "error": "one\u2028two\x85three"}, {"id": 2}]
    for line in lines:
        append_line(path, line)
    assert read_lines(path) == lines

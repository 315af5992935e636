"""Versions on disk: the last good one comes back, any can be chosen or exported."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.trainer.draft import DraftCopy, to_bytes
from adaserve.trainer.versions import (
    KEPT,
    DamagedError,
    Version,
    VersionError,
    Versions,
    fingerprint_of,
)
from tests.trainer.factories import save_drafts


def version(draft: str = "/models/draft", score: float = 1.5) -> Version:
    return Version(0, 0.0, score, 1.4, 1.3, 5000, draft)


def restarted(versions: Versions) -> None:
    """As by a server that has the folder for a moment."""
    os.close(versions.claim())


def test_the_last_one_is_current_and_another_can_be_chosen(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "new")
    assert versions.current("/models/draft") is None and versions.history() == []
    for number in (1, 2):
        assert versions.add(b"weights %d" % number, version()).number == number
    for chosen, expected in ((None, b"weights 2"), (1, b"weights 1")):
        if chosen is not None:
            versions.choose(chosen)
            restarted(versions)
        found = versions.current("/models/draft")
        assert found is not None and found[1] == expected
    versions.choose(0)
    restarted(versions)
    assert versions.current("/models/draft") is None
    with pytest.raises(VersionError, match="no version 3: there are 1, 2"):
        versions.choose(3)


def test_what_was_chosen_serves_next_whatever_the_running_server_keeps(tmp_path: Path) -> None:
    """Its weights must be there then, and what is learned from it serves after it."""
    versions = Versions(tmp_path)
    for number in (1, 2):
        versions.add(b"weights %d" % number, version())
    lock = versions.claim()
    versions.choose(1)
    for _ in range(KEPT + 3):
        versions.add(b"newer", version())
    os.close(lock)
    for expected in (b"weights 1", b"from 1"):
        restarted(versions)
        found = versions.current("/models/draft")
        assert found is not None and found[1] == expected
        versions.add(b"from 1", version())


def test_a_folder_of_another_draft_is_refused(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.add(b"x", version("/models/other"))
    with pytest.raises(VersionError, match="began as /models/other"):
        versions.current("/models/draft")


def test_versions_belong_to_weights_and_not_to_a_path(tmp_path: Path) -> None:
    """Another draft at the same path, and the same draft at another."""
    draft, moved, out = (tmp_path / name for name in ("draft", "moved", "out"))
    save_drafts(draft)
    versions = Versions(tmp_path / "kept")
    began = version(str(draft))
    began.began_as = fingerprint_of(str(draft))
    versions.add(b"weights 1", began)
    shutil.copytree(draft, moved)
    for folder in (draft, moved):
        found = versions.current(str(folder))
        assert found is not None and found[1] == b"weights 1"
    versions.export(1, out)
    save_drafts(draft, noise=0.3)
    with pytest.raises(VersionError, match="with other weights than it has now: give another folder"):
        versions.current(str(draft))
    with pytest.raises(VersionError, match="has other weights than version 1 began with"):
        versions.export(1, out)
    versions.choose(0)
    restarted(versions)
    assert versions.current(str(draft)) is None


def test_a_version_that_knows_no_fingerprint_goes_by_its_path(tmp_path: Path) -> None:
    """As those that were kept before there were any."""
    save_drafts(tmp_path / "draft")
    versions = Versions(tmp_path / "kept")
    versions.add(b"weights 1", version(str(tmp_path / "draft")))
    assert versions.current(str(tmp_path / "draft")) is not None
    with pytest.raises(VersionError, match="not /models/other"):
        versions.current("/models/other")
    assert fingerprint_of("/models/other") == ""


def test_old_weights_go_and_their_history_stays(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for _ in range(KEPT + 5):
        versions.add(b"x", version())
    assert len(versions.history()) == KEPT + 5
    assert [v.number for v in versions.history() if versions.has_weights(v)] == list(range(6, KEPT + 6))


def test_a_line_that_was_cut_off_costs_that_line_alone(tmp_path: Path) -> None:
    """A machine that lost its power leaves one; the server must still start, and learning go on."""
    versions = Versions(tmp_path)
    versions.add(b"weights 1", version())
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"number": 2, "at": 17')
    assert [v.number for v in versions.history()] == [1]
    found = versions.current("/models/draft")
    assert found is not None and found[1] == b"weights 1"
    versions.add(b"weights 2", version())
    odd = msgspec.json.encode(version()).replace(b"/models", b"\xff\xfe")
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(odd + b"\n")
    assert [v.number for v in versions.history()] == [1, 2]
    found = versions.current("/models/draft")
    assert found is not None and found[1] == b"weights 2"


def test_a_damaged_folder_is_no_other_drafts_folder(tmp_path: Path) -> None:
    """A server refuses the second, and starts all the same with the first."""
    versions = Versions(tmp_path)
    versions.add(b"weights 1", version())
    for written in (b"", b"\xff\xfe", b"two"):
        (tmp_path / "current").write_bytes(written)
        with pytest.raises(DamagedError, match="damaged"):
            versions.current("/models/draft")
    versions.choose(1)
    restarted(versions)
    weights = tmp_path / "draft-00001.safetensors"
    for written in (b"", b"weight", b"weights 3"):
        weights.write_bytes(written)
        with pytest.raises(DamagedError, match=f"{weights} is damaged"):
            versions.current("/models/draft")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(DamagedError, match=f"{weights} cannot be read"):
        versions.current("/models/draft")
    weights.rmdir()
    with pytest.raises(DamagedError, match="no version 1"):
        versions.current("/models/draft")
    versions.add(b"weights 2", version())
    found = versions.current("/models/draft")
    assert found is not None and found[1] == b"weights 2"


def test_what_a_disk_has_no_room_for_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it would keep the disk full for all others."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    versions = Versions(tmp_path)
    versions.add(b"weights 1", version())
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        versions.add(b"weights 2", version())
    assert set(tmp_path.iterdir()) == before


def test_two_servers_do_not_keep_drafts_in_one_folder(tmp_path: Path) -> None:
    """They would number them alike, and write each other's weights."""
    first, second = Versions(tmp_path / "new"), Versions(tmp_path / "new")
    lock = first.claim()
    with pytest.raises(VersionError, match="a folder of its own"):
        second.claim()
    os.close(lock)
    os.close(second.claim())


def test_a_folder_that_holds_a_model_is_refused(tmp_path: Path) -> None:
    """SGLang takes all weights that lie beside a model for its own, and so would its fingerprint."""
    save_drafts(tmp_path)
    with pytest.raises(VersionError, match="holds a model: give a folder of its own"):
        Versions(tmp_path).claim()


def test_the_commands(tmp_path: Path) -> None:
    save_drafts(tmp_path / "draft")
    draft = DraftCopy(str(tmp_path / "draft"))
    state = {name: tensor + 0.25 for name, tensor in draft.state().items()}
    run, kept = CliRunner().invoke, str(tmp_path / "kept")
    assert "no versions yet" in run(app, ["draft", "history", str(tmp_path)]).stdout
    assert run(app, ["draft", "load", str(tmp_path), "0"]).exit_code == 2, "of another folder"
    versions = Versions(tmp_path / "kept")
    versions.add(to_bytes(state), version(str(tmp_path / "draft"), 1.234))
    shown = run(app, ["draft", "history", kept], env={"COLUMNS": "80"}).output
    assert "1.234" in shown and "…" not in shown
    assert run(app, ["draft", "save", kept, "1", str(tmp_path / "out")]).exit_code == 0
    exported = DraftCopy(str(tmp_path / "out")).state()
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.items())
    assert run(app, ["draft", "load", kept, "0"]).exit_code == 0
    restarted(versions)
    assert versions.current(str(tmp_path / "draft")) is None
    refused = run(app, ["draft", "load", kept, "7"])
    assert refused.exit_code == 2 and "no version 7" in refused.output


def test_a_version_is_saved_over_nothing(tmp_path: Path) -> None:
    """Not over another checkpoint, nor over the draft that it needs the configuration of."""
    save_drafts(tmp_path / "draft")
    weights = (tmp_path / "draft" / "model.safetensors").read_bytes()
    Versions(tmp_path / "kept").add(b"learned", version(str(tmp_path / "draft")))
    save = ["draft", "save", str(tmp_path / "kept"), "1", str(tmp_path / "draft")]
    refused = CliRunner().invoke(app, save)
    assert refused.exit_code == 2 and "overwritten" in refused.output
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == weights

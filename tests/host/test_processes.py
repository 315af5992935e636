"""What servers that were killed have left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adaserve.errors import UserError
from adaserve.host import processes
from adaserve.host.processes import left_behind, remove_leftovers, require_room

HOLD = (
    "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 9); print(flush=True); input()"
)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_shared_memory_that_nobody_has_any_more_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    old, held, new = (Path(f"/dev/shm/sglang_loads_test{os.getpid()}_{i}.shm") for i in range(3))
    other = Path(f"/dev/shm/adaserve-test-{os.getpid()}")
    for path in (old, held, new, other):
        path.write_bytes(bytes(9))
        hour_ago = time.time() - 3600 * (path != new)
        os.utime(path, (hour_ago, hour_ago))
    command = [sys.executable, "-c", HOLD, str(held)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        own = os.stat("/proc/self/ns/pid").st_ino
        monkeypatch.setattr(processes, "_FIRST_PID_NAMESPACE", own + 1)
        remove_leftovers()
        assert old.exists(), "a process that can't be seen from this container may have mapped it"
        monkeypatch.setattr(processes, "_FIRST_PID_NAMESPACE", own)
        remove_leftovers()
        assert not old.exists(), "every server that is killed leaves one"
        assert held.exists(), "a server runs with it"
        assert new.exists(), "a server may be about to map it"
        assert other.exists(), "it is none of ours"
    finally:
        process.kill()
        process.communicate()
        for path in (old, held, new, other):
            path.unlink(missing_ok=True)


def test_a_server_without_room_for_shared_files_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_SHARED", str(tmp_path))
    require_room()
    monkeypatch.setattr(processes, "_ROOM_BYTES", 1 << 62)
    with pytest.raises(UserError, match=f"{tmp_path} has no room"):
        require_room()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_what_a_server_has_not_made_is_not_left_behind() -> None:
    folder = Path(f"/dev/shm/adaserve-test-{os.getpid()}-folder")
    folder.mkdir()
    made, inside = Path(f"/dev/shm/adaserve-test-{os.getpid()}"), folder / "model.safetensors"
    loads = Path(f"/dev/shm/sglang_loads_test{os.getpid()}.shm")
    gone = Path(f"/dev/shm/adaserve-test-{os.getpid()} (deleted)")
    try:
        for path in (made, inside, loads):
            path.write_bytes(bytes(9))
        every = {made, inside, loads, gone}
        assert left_behind(every, time.time()) == {made, loads}
        assert left_behind(every, time.time() + 60.0) == {loads}, "the server came later"
    finally:
        for path in (made, inside, loads):
            path.unlink(missing_ok=True)
        folder.rmdir()

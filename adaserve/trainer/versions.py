"""Drafts that have served, on disk, for those who ask for it (``--adaserve-learn-folder``).

A folder holds ``history.jsonl`` with a line for each version, the weights of the newest ones, ``current``:
the version that a server starts with, and maybe ``chosen``: the one that it is to start with next time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from adaserve.checkpoints.fingerprint import fingerprint, local_folder
from adaserve.errors import UserError
from adaserve.pair.folders import PLAIN_NAME, copy_companions
from adaserve.sharpening import Correction, load_sharpening

logger = logging.getLogger(__name__)

KEPT = 8
"""Versions whose weights are kept; of older ones only the history remains."""
_HISTORY, _CURRENT, _CHOSEN, _LOCK = "history.jsonl", "current", "chosen", "lock"


class VersionError(UserError, ValueError):
    """There is no such version, it was trained for another draft, or another server has the folder."""


class DamagedError(VersionError):
    """The version that a server should start with cannot be read."""


class Version(msgspec.Struct):
    """A draft that has served, and what it was judged by: expected accepted tokens of a chain of 4."""

    number: int
    at: float  # epoch seconds
    score: float
    replaced: float  # of the draft before it, on the same requests
    first: float  # of the draft that the server was started with
    tokens: int  # learned from, since its trainer was started
    draft: str  # the checkpoint that it began as
    correction: Correction = Correction()  # of how that one is read
    began_as: str = ""  # `fingerprint_of` that checkpoint; "" = not known
    sha256: str = ""  # of its file of weights; "" = not known


class Versions:
    """One folder; written by the trainer alone, and by that of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def history(self) -> list[Version]:
        """Oldest first, without lines that were cut off while they were written."""
        found = []
        for line in self._lines():
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                found.append(msgspec.json.decode(line, type=Version))
        return found

    def _lines(self) -> list[bytes]:
        path = self.folder / _HISTORY
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    def has_weights(self, version: Version) -> bool:
        return self._file(version.number).exists()

    def add(self, weights: bytes, version: Version) -> Version:
        """Saves a draft as the newest version, which is current from now on; returns it with its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        past = self.history()
        version.number = 1 + max((v.number for v in past), default=0)
        version.at, version.sha256 = time.time(), sha256(weights).hexdigest()
        _replace(self._file(version.number), weights)
        torn = any(not line.endswith(b"\n") for line in self._lines()[-1:])
        with (self.folder / _HISTORY).open("ab") as file:
            file.write(b"\n" * torn + msgspec.json.encode(version) + b"\n")
        _replace(self.folder / _CURRENT, str(version.number).encode())
        for old in past[: 1 - KEPT]:
            if str(old.number) != self._chosen():
                self._file(old.number).unlink(missing_ok=True)
        return version

    def choose(self, number: int) -> None:
        """Makes a version current when the next server claims the folder, whatever this one still adds. 0 is
        the draft as it came. Raises VersionError."""
        if number or not self.history():
            self._known(number)
        _replace(self.folder / _CHOSEN, str(number).encode())

    def _chosen(self) -> str:
        """Empty where nothing is."""
        path = self.folder / _CHOSEN
        return path.read_text(errors="replace") if path.exists() else ""

    def current(self, draft: str) -> tuple[Version, bytes] | None:
        """The current version and its weights; None for the draft as it came.

        Raises VersionError when it did not begin with the weights of ``draft``, DamagedError when it cannot
        be had."""
        try:
            number = int((self.folder / _CURRENT).read_text())
            if not number:
                return None
            version = self._known(number)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamagedError(f"the current version in {self.folder} is damaged ({error})") from error
        if not _began_with(version, draft):
            not_as = f"not {draft}" if version.draft != draft else "with other weights than it has now"
            raise VersionError(
                f"{self.folder} holds drafts that began as {version.draft}, {not_as}: give another folder"
            )
        return version, self._weights(version)

    def claim(self) -> int:
        """No other server may keep drafts here until this process ends, or closes the descriptor that this
        gives. What was chosen is current from now on. Raises VersionError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "config.json").exists():
            raise VersionError(f"{self.folder} holds a model: give a folder of its own")
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise VersionError(
                f"another server keeps its drafts in {self.folder}: give each server a folder of its own"
            ) from None
        except OSError as error:  # some network file systems know no locks
            logger.warning(
                "AdaServe: %s cannot be locked: let no other server use it (%s)", self.folder, error
            )
        with suppress(FileNotFoundError):
            os.replace(self.folder / _CHOSEN, self.folder / _CURRENT)
        return lock

    def export(self, number: int, out: Path) -> None:
        """Writes a checkpoint that SGLang serves, with the companions of the draft it began as."""
        version = self._known(number)
        if not Path(version.draft).is_dir():
            raise VersionError(f"{version.draft}, whose configuration is needed, is not a folder here")
        if not _began_with(version, version.draft):
            raise VersionError(
                f"{version.draft}, whose configuration is needed, has other weights than version {number} "
                "began with"
            )
        weights = self._weights(version)
        copy_companions(Path(version.draft), out)
        load_sharpening(Path(version.draft)).corrected(version.correction).save(out)
        (out / PLAIN_NAME).write_bytes(weights)

    def _weights(self, version: Version) -> bytes:
        """As they were kept. Raises DamagedError."""
        file = self._file(version.number)
        try:
            weights = file.read_bytes()
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error.strerror}") from error
        if version.sha256 and version.sha256 != sha256(weights).hexdigest():
            raise DamagedError(f"{file} is damaged")
        return weights

    def _known(self, number: int) -> Version:
        for version in self.history():
            if version.number == number and self.has_weights(version):
                return version
        there = [str(v.number) for v in self.history() if self.has_weights(v)]
        raise VersionError(f"{self.folder} has no version {number}: there are {', '.join(there) or 'none'}")

    def _file(self, number: int) -> Path:
        return self.folder / f"draft-{number:05d}.safetensors"


def fingerprint_of(draft: str) -> str:
    """Of the weights of a checkpoint; "" where they are not on this host."""
    folder = Path(local_folder(draft))
    return fingerprint(folder) if folder.is_dir() else ""


def _began_with(version: Version, draft: str) -> bool:
    """Whether a version was trained from the weights that ``draft`` has now. Where these cannot be compared,
    its path decides."""
    now = fingerprint_of(draft) if version.began_as else ""
    return version.began_as == now if now else os.path.abspath(version.draft) == os.path.abspath(draft)


def _replace(path: Path, data: bytes) -> None:
    """All of it or nothing, also where the machine loses its power or the disk is full."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

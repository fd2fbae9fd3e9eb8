"""The directory that one store makes for itself, and what becomes of those that were left behind.

The file in it is locked as long as its process lives. What is there and not locked was left by a
process that was killed, whatever its number, and on whatever machine that shares the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from jdelta._src.errors import SpillError

PREFIX = "jdelta-spill-"
FILE = "tensors"


class Directory:
    """A new directory (0700) with one empty, locked file (0600) in it.

    Attributes:
        file: The file.
        descriptor: Open for reading and writing, and holds the lock.
    """

    def __init__(self, path: str):
        """Makes it in ``path``, after what other processes left there is removed."""
        try:
            remove_stale(path)
            self.file, self.descriptor = _make(path)
        except OSError as error:
            raise SpillError(
                f"spill: {path!r} cannot be used: {error.strerror or error}; name an existing "
                "directory that this user may write to"
            ) from error

    def remove(self) -> None:
        """Removes it; what others have removed already is no error."""
        os.close(self.descriptor)
        _remove(self.file)


def remove_stale(path: str) -> None:
    """Removes directories in ``path`` whose processes have ended without doing so."""
    for folder in Path(path).iterdir():
        if folder.name.startswith(PREFIX) and not folder.is_symlink():
            with contextlib.suppress(OSError):  # of another user, or just gone
                _remove_unless_locked(folder / FILE)


def _remove_unless_locked(file: Path) -> None:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        file.parent.rmdir()
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(file)
    finally:
        os.close(descriptor)


def _make(path: str) -> tuple[Path, int]:
    """Another process may take what is not locked yet for stale: then it is made once more."""
    while True:
        file = Path(tempfile.mkdtemp(dir=path, prefix=f"{PREFIX}{os.getpid()}-")) / FILE
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            continue
        try:
            if _locks(descriptor):
                return file, descriptor
        except OSError:  # a file system without locks
            _remove(file)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    """Whether the file is still there once it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
    with contextlib.suppress(OSError):
        file.parent.rmdir()

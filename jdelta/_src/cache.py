"""Small records kept on disk between processes."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import cast


def cache_dir() -> Path:
    """``$JDELTA_CACHE_DIR``, or ``jdelta`` in the user's cache directory."""
    if chosen := os.environ.get("JDELTA_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdelta"


def key(*parts: str) -> str:
    """A name for the record that ``parts`` determine; their order counts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(section: str, name: str) -> dict[str, object] | None:
    """The record written under this name; ``None`` when absent, unreadable or not a record."""
    try:
        record: object = json.loads(_path(section, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast(dict[str, object], record) if isinstance(record, dict) else None


def write(section: str, name: str, record: dict[str, object]) -> None:
    """Keeps ``record``, whole or not at all; a directory that cannot be written is no error."""
    path = _path(section, name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(record))


def _path(section: str, name: str) -> Path:
    return cache_dir() / section / f"{name}.json"


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise

"""Where the records of a file begin, found once and kept: arrays of numbers under a name made of the file's stamp.

A changed file has another stamp, so an index is never stale. An index that cannot be read or written is made again;
small files are not worth keeping one. The folder is `$TRUELINE_CACHE`, or `trueline` in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trueline import events, files
from trueline.errors import StorageError
from trueline.storage.file import File

Arrays = dict[str, npt.NDArray[np.generic]]

CACHE = "TRUELINE_CACHE"
_VERSION = 1
_WORTH_BYTES = 1 << 20
"""Smaller files are indexed whenever they are listed."""


def cache_folder() -> Path:
    """Where this user's caches lie; processes of one machine share it."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"


def load_index(file: File, kind: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make` gives for `file`, from the cache when it is there. `kind` says what was looked for, and how."""
    if file.stamp.size < _WORTH_BYTES:
        return make()
    path = cache_folder() / "index" / f"{_key(file, kind)}.npz"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _key(file: File, kind: str) -> str:
    where = os.path.realpath(file.path) if file.path else file.uri
    return hashlib.sha256(f"{_VERSION}|{kind}|{where}|{file.stamp}".encode()).hexdigest()[:40]


def _read(path: Path) -> Arrays | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        events.emit("index.unreadable", path=str(path), why=str(error))
        return None


def _write(path: Path, arrays: Arrays) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its stub takes names of arrays for its own option
    try:
        files.write_atomic(path, buffer.getvalue())
    except StorageError as error:
        events.emit("index.not_kept", path=str(path), why=error.message)

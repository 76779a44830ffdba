"""An index of where the records of a file begin, built once: arrays in a cache file named by the file's stamp.

A changed file has another stamp, so an index is never stale. One that cannot be read or written is built again. The
folder is `$TRUELINE_CACHE`, or `trueline` in the user's cache folder.
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
_MIN_FILE_BYTES = 1 << 20
"""The index of a smaller file is not stored."""


def cache_folder() -> Path:
    """The folder of this user's caches, which all processes of a machine share."""
    folder = os.environ.get(CACHE)
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trueline"


def load_index(file: File, kind: str, build: Callable[[], Arrays]) -> Arrays:
    """`build()`, from the cache when it was stored there for this file and `kind` of index."""
    if file.stamp.size < _MIN_FILE_BYTES:
        return build()
    location = os.path.realpath(file.path) if file.path else file.uri
    key = hashlib.sha256(f"{_VERSION}|{kind}|{location}|{file.stamp}".encode()).hexdigest()[:40]
    path = cache_folder() / "index" / f"{key}.npz"
    arrays = _read(path)
    if arrays is None:
        arrays = build()
        _write(path, arrays)
    return arrays


def _read(path: Path) -> Arrays | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
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

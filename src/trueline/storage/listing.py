"""The files that a URI means, in a fixed order, each with a stamp that tells another content from this one.

Local paths, globs, folders and `file://` here; every other scheme goes to `remote`. A file given twice is refused:
its records would be trained twice. Nothing is read.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from trueline.errors import DataError, join_names
from trueline.storage.completeness import PLAN, check_complete
from trueline.storage.concurrent import map_concurrently
from trueline.storage.file import File, LocalFile, Uri, is_remote, is_visible, local_path
from trueline.storage.remote import list_store


def list_files(uris: Sequence[Uri], suffixes: Sequence[str], *, complete: bool = True) -> list[File]:
    """The files of `uris`, in the order given; of folders those that end in one of `suffixes`, by name.

    A file that is named outright is taken whatever its ending. Raises DataError for what does not exist, for a folder
    without such files, for a file that is meant twice, and, if `whole`, for a folder that was written in part.
    """
    listed_one = partial(_list_one, suffixes, complete)
    every = map_concurrently(listed_one, uris) if any(map(is_remote, uris)) else None
    found = list(chain.from_iterable(every or map(listed_one, uris)))
    seen: set[str] = set()
    for file in found:
        identity = os.path.realpath(file.path) if file.path else file.uri
        if identity in seen:
            raise DataError(
                f"{file.uri} is given twice", hint="name each file once; its records would be trained twice"
            )
        seen.add(identity)
    return found


def _list_one(suffixes: Sequence[str], whole: bool, uri: Uri) -> list[File]:
    if is_remote(uri):
        return list_store(os.fspath(uri), suffixes, complete=whole)
    folder = local_path(uri)
    if whole and (folder / PLAN).exists():
        check_complete(str(uri), os.listdir(folder), lambda name: (folder / name).read_bytes())
    return [LocalFile.at(path) for path in _paths(os.fspath(uri), suffixes)]


def _paths(uri: str, suffixes: Sequence[str]) -> list[Path]:
    path = local_path(uri)
    if path.is_dir():
        found = sorted(
            one for one in path.rglob("*") if one.suffix in suffixes and is_visible(one.name) and one.is_file()
        )
    elif path.exists():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if not found:
        kind = f"folder has no {join_names(suffixes)} files" if path.is_dir() else "file does not exist"
        raise DataError(f"no records at '{uri}': the {kind}", hint="paths are relative to the current folder")
    return found

"""The files that a URI means, in a fixed order, each with a stamp that tells another content from this one.

Local paths, globs, folders and `file://` here; every other scheme goes to `remote`. A file given twice is refused:
its records would be trained twice. Nothing is read.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, cast
from urllib.parse import unquote, urlsplit

from trueline.errors import DataError, join_names
from trueline.storage.completeness import PLAN, check_whole
from trueline.storage.concurrent import all_together

Uri = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file was when it was listed: another stamp later is another content."""

    size: int
    version: str
    """Time and inode of a local file; ETag or time of an object."""


class File(Protocol):
    """A file of records, wherever it lies. Two of them with one stamp hold the same bytes."""

    @property
    def uri(self) -> str:
        """For people and messages: no password, no token."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def stamp(self) -> Stamp: ...

    @property
    def path(self) -> Path | None:
        """Where it lies on this machine, if it does: such a file may be mapped into memory."""
        ...

    def open(self, *, little: bool = False) -> AbstractContextManager[BinaryIO]:
        """A seekable reader of the listed content; `little`: for some kilobytes of it. Raises DataError, OSError."""
        ...

    def check(self) -> None:
        """Raises DataError when the file has gone, or is not the one that was listed."""
        ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path
    stamp: Stamp

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        return cls(path, _stamp(path))

    @property
    def uri(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def open(self, *, little: bool = False) -> AbstractContextManager[BinaryIO]:
        return cast(BinaryIO, self.path.open("rb"))

    def check(self) -> None:
        found = _stat(self.path)
        if found.st_size != self.stamp.size or _version(found) != self.stamp.version:
            raise DataError(
                f"{self.path} was changed while it was in use",
                hint="write new records to a new file, then start again",
            )


def is_remote(uri: Uri) -> bool:
    text = os.fspath(uri)
    return "://" in text and urlsplit(text).scheme != "file"


def local_path(uri: Uri) -> Path:
    text = os.fspath(uri)
    return Path(unquote(urlsplit(text).path)) if "://" in text else Path(text)


def list_files(uris: Sequence[Uri], suffixes: Sequence[str], *, whole: bool = True) -> list[File]:
    """The files of `uris`, in the order given; of folders those that end in one of `suffixes`, by name.

    A file that is named outright is taken whatever its ending. Raises DataError for what does not exist, for a folder
    without such files, for a file that is meant twice, and, if `whole`, for a folder that was written in part.
    """
    listed_one = partial(_listed, suffixes, whole)
    every = all_together(listed_one, uris) if any(map(is_remote, uris)) else None
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


def _listed(suffixes: Sequence[str], whole: bool, uri: Uri) -> list[File]:
    if is_remote(uri):
        from trueline.storage.remote import list_store

        return list_store(os.fspath(uri), suffixes, whole=whole)
    folder = local_path(uri)
    if whole and (folder / PLAN).exists():
        check_whole(str(uri), os.listdir(folder), lambda name: (folder / name).read_bytes())
    return [LocalFile.at(path) for path in _paths(os.fspath(uri), suffixes)]


def visible(path: str) -> bool:
    """Files that a writer left for itself (`_SUCCESS`, `.crc`) hold no records."""
    return not path.rpartition("/")[2].startswith((".", "_"))


def _paths(uri: str, suffixes: Sequence[str]) -> list[Path]:
    path = local_path(uri)
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.suffix in suffixes and visible(one.name) and one.is_file())
    elif path.exists():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    if not found:
        kind = f"folder has no {join_names(suffixes)} files" if path.is_dir() else "file does not exist"
        raise DataError(f"no records at '{uri}': the {kind}", hint="paths are relative to the current folder")
    return found


def _stamp(path: Path) -> Stamp:
    found = _stat(path)
    return Stamp(found.st_size, _version(found))


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _version(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_ino}"

"""A file of records, local or in an object store, and the stamp that identifies its content."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast
from urllib.parse import unquote, urlsplit

from trueline.errors import DataError

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

    def open(self, *, from_end: bool = False) -> AbstractContextManager[BinaryIO]:
        """A seekable reader of the listed content; `from_end`: for some kilobytes of it. Raises DataError, OSError."""
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

    def open(self, *, from_end: bool = False) -> AbstractContextManager[BinaryIO]:
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


def is_visible(path: str) -> bool:
    """Files that a writer left for itself (`_SUCCESS`, `.crc`) hold no records."""
    return not path.rpartition("/")[2].startswith((".", "_"))


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

"""Local paths and URLs of object stores; files of records, with a stamp that identifies their content."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self, cast
from urllib.parse import unquote, urlsplit

from trueline.errors import DataError

Uri = str | os.PathLike[str]
Uris = Uri | Sequence[Uri]
Location = str | Path
"""A local path or a URL. A URL stays a string: a Path would drop one of its two slashes."""


def is_remote(uri: Uri) -> bool:
    text = os.fspath(uri)
    return "://" in text and urlsplit(text).scheme != "file"


def local_path(uri: Uri) -> Path:
    text = os.fspath(uri)
    return Path(unquote(urlsplit(text).path)) if "://" in text else Path(text)


def parse_location(location: Location) -> Location:
    """`location` as a Path when it is local, else as a URL without a slash at its end.

    >>> parse_location("s3://bucket/digits/"), parse_location("file:///tmp/digits")
    ('s3://bucket/digits', PosixPath('/tmp/digits'))
    """
    return str(location).rstrip("/") if is_remote(location) else local_path(location)


def join_location(location: Location, name: str) -> Location:
    """
    >>> join_location("s3://bucket/digits", "step-00000120")
    's3://bucket/digits/step-00000120'
    """
    parent = parse_location(location)
    return parent / name if isinstance(parent, Path) else f"{parent}/{name}"


def split_location(location: Location) -> tuple[Location, str]:
    """The parent and the name in it.

    >>> split_location("s3://bucket/digits/step-00000120")
    ('s3://bucket/digits', 'step-00000120')
    """
    parsed = parse_location(location)
    if isinstance(parsed, Path):
        return parsed.absolute().parent, parsed.absolute().name
    head, _, name = parsed.rpartition("/")
    return head, name


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies the content that a file had when it was listed."""

    size: int
    version: str
    """Time and inode of a local file; ETag or time of an object."""


class File(Protocol):
    """A file of records. Two with the same stamp hold the same bytes."""

    @property
    def uri(self) -> str:
        """For messages: without password and token."""
        ...

    @property
    def name(self) -> str: ...

    @property
    def stamp(self) -> Stamp: ...

    @property
    def path(self) -> Path | None:
        """Of a file on this machine, which may be mapped into memory."""
        ...

    def open(self, *, from_end: bool = False) -> AbstractContextManager[BinaryIO]:
        """A seekable reader; `from_end`: of a footer, some kilobytes. Raises DataError, OSError."""
        ...

    def check(self) -> None:
        """Raises DataError when the file is missing or its content is not the listed one."""
        ...


def read_range(file: File, start: int, stop: int) -> bytes:
    with file.open() as opened:
        opened.seek(start)
        return opened.read(stop - start)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A local file, and what told its state when it was found."""

    path: Path
    stamp: Stamp

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(path, _read_stamp(path))

    @property
    def uri(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def open(self, *, from_end: bool = False) -> AbstractContextManager[BinaryIO]:
        return cast(BinaryIO, self.path.open("rb"))

    def check(self) -> None:
        if _read_stamp(self.path) != self.stamp:
            raise DataError(
                f"{self.path} was changed while it was in use", hint="write new records to a new file, then start again"
            )


def _read_stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return Stamp(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")

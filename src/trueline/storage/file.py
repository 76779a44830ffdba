"""A file of records, local or in an object store, and the stamp that identifies its content."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from trueline.errors import DataError


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


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path
    stamp: Stamp

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        """Raises DataError."""
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
                f"{self.path} was changed while it was in use",
                hint="write new records to a new file, then start again",
            )


def _read_stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return Stamp(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")

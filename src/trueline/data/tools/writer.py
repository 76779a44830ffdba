"""Records written by range, each range once, whoever dies on the way.

    <where>/_plan.json                              how many records, in ranges of how many, of what
    <where>/part-000000000000-000000065536.parquet  a range, whole or absent: a rename, or one PUT of an object
    <where>/_commit.json                            every part with records and digest; it comes last

Many processes may write one folder: they agree on the plan, and of a range that two of them write the first one's part
stays, also when the second was frozen for an hour and computes other numbers. On a disk a part is named by link(2), in
a store by a PUT with `If-None-Match: *`. Which stores refuse such a PUT is tried, not believed. Where one does not,
a writer looks before it writes, and one that is frozen between the two still replaces the part.

Who starts again writes what is missing. A folder without its commit list, or with less than that names, is not read
(`whole.py`); names that begin with `_` hold no records. Local folders and every store of fsspec. Source: RFC 9110,
section 13.1.2.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from trueline import events, files
from trueline.data.formats.encode import ENCODERS, encode_table
from trueline.errors import DataError, StorageError, join_names
from trueline.storage.listing import COMMIT, PLAN
from trueline.storage.location import Uri, is_remote, local_path

RANGE_RECORDS = 65536
TWICE = "_twice"
_TWICE = b"Written a second time by each writer at its start, to see whether this store refuses that.\n"


class Folder(Protocol):
    """Files by name, each whole or absent. Raises StorageError."""

    def write(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        """Whether `data` was written; without `replace` it is not where `name` is there."""
        ...

    def get(self, name: str) -> bytes | None: ...

    def names(self) -> set[str]: ...


@dataclass(frozen=True, slots=True)
class LocalFolder:
    path: Path

    def write(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        return files.write_atomic(self.path / name, data, replace=replace)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error.strerror}") from error

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()


@dataclass(slots=True)
class StoreFolder:
    """An object exists once its PUT is done."""

    fs: Any
    root: str
    refuses: bool | None = field(default=None, init=False)
    """Whether the store refuses to write an object that is there; None until it was tried."""

    def write(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        path = f"{self.root}/{name}"
        if not replace and self.refuses is None:
            why = self._overwrites()
            self.refuses = not why
            if why:
                events.emit("store.overwrites", where=self.root, why=why)
        try:
            if not replace and self._exists(path):
                return False
            if not replace and self.refuses:
                return self._create(path, data)
            self.fs.pipe_file(path, data)
        except OSError as error:
            raise _store_error(path, error) from None
        return True

    def _exists(self, path: str) -> bool:
        """Asked also where the store refuses: what is there need not be sent, and large objects go in several parts,
        for whose end some stores know no condition."""
        self.fs.invalidate_cache(self.root)
        return bool(self.fs.exists(path))

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(path, data, mode="create")
        except Exception as error:
            if not _is_conflict(error):
                raise
            return False
        return True

    def _overwrites(self) -> str:
        """Why the store cannot be relied on to refuse, or nothing. Tried on an object that nobody reads: who reads the
        plan could find one that is being replaced."""
        from fsspec import AbstractFileSystem

        if getattr(self.fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            return "its package knows no condition, and only looks before it writes"
        try:
            twice = all(self._create(f"{self.root}/{TWICE}", _TWICE) for _ in range(2))
        except Exception as error:  # noqa: BLE001 - packages say in their own ways that they know no condition
            return _words(error)
        return "it wrote an object a second time" if twice else ""

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _store_error(f"{self.root}/{name}", error) from None

    def names(self) -> set[str]:
        self.fs.invalidate_cache(self.root)
        try:
            return {key.rpartition("/")[2] for key in self.fs.ls(self.root, detail=False)}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _store_error(self.root, error) from None


def _is_conflict(error: Exception) -> bool:
    """s3fs makes a FileExistsError of AWS's answer only; Swift's 412, and the answer to the one of two writers at the
    same moment that lost, are in the cause."""
    answer = getattr(error.__cause__, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    lost = answer.get("Error", {}).get("Code") == "ConditionalRequestConflict"
    return isinstance(error, FileExistsError) or status == 412 or lost


def _store_error(where: str, error: OSError) -> StorageError:
    return StorageError(f"the store fails at {where}: {_words(error)}")


def _words(error: Exception) -> str:
    from trueline.storage.object_store import redact_text

    return redact_text(f"{type(error).__name__}: {error}")


def open_folder(where: Uri) -> Folder:
    if not is_remote(where):
        return LocalFolder(local_path(where))
    from trueline.storage.object_store import open_store

    fs, root = open_store(str(where))
    return StoreFolder(fs, root.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What a folder is to hold. `of` is a digest of what the records are made from."""

    num_records: int
    range_records: int = RANGE_RECORDS
    format: str = "parquet"
    of: str = ""

    def ranges(self) -> list[tuple[int, int]]:
        step, count = self.range_records, self.num_records
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def name(self, start: int, stop: int) -> str:
        return f"part-{start:012d}-{stop:012d}{ENCODERS[self.format][0]}"


class RangeWriter:
    """Writes the ranges of `plan` to a folder. Raises DataError for a plan that is not the folder's."""

    def __init__(self, where: Uri, plan: WritePlan) -> None:
        if plan.format not in ENCODERS:
            raise DataError(f"'{plan.format}' cannot be written (there are: {join_names(ENCODERS)})")
        if plan.num_records < 1 or plan.range_records < 1:
            raise DataError(f"{plan.num_records} records in ranges of {plan.range_records}; expected 1 or more")
        self.plan, self._where, self._folder = plan, where, open_folder(where)
        mine = _json(asdict(plan))
        found = self._folder.get(PLAN)
        if found is None:
            strangers = sorted(name for name in self._folder.names() if not name.startswith(".") and name != TWICE)
            if strangers:
                raise DataError(f"{where} is not empty (it has {join_names(strangers[:3])})", hint="name a new folder")
            self._folder.write(PLAN, mine)
            found = self._folder.get(PLAN)  # of two that begin at the same moment one gives way
        if found != mine:
            theirs = (found or b"").decode(errors="replace").strip()
            raise DataError(
                f"{where} holds what was made of something else: {theirs}, now {mine.decode()}",
                hint="name a new folder, or give the arguments of the first run",
            )

    def missing(self) -> list[tuple[int, int]]:
        """The ranges that nobody has written, in order."""
        there = self._folder.names()
        return [(start, stop) for start, stop in self.plan.ranges() if self.plan.name(start, stop) not in there]

    def write(self, start: int, stop: int, table: pa.Table) -> None:
        """Records [start, stop), which is one of the plan's ranges; if it is there, it stays. Raises DataError,
        StorageError."""
        if (start, stop) not in ((s, e) for s, e in self.plan.ranges()[start // self.plan.range_records :][:1]):
            raise DataError(f"[{start}, {stop}) is no range of the plan (they are of {self.plan.range_records})")
        if len(table) != stop - start:
            raise DataError(f"range [{start}, {stop}) was given {len(table)} records")
        name, data = self.plan.name(start, stop), encode_table(table, self.plan.format)
        if self._folder.write(name, data):
            return
        there = self._folder.get(name)
        if there is None:
            raise StorageError(f"{name} of {self._where} was there and is gone", hint="start again: it is missing now")
        if there != data:  # otherwise the first writer was this one, whose store's package asked twice
            events.emit("part.kept", name=name, why="another writer was first, and wrote other content")

    def commit(self) -> dict[str, Any]:
        """Says that all is there. Raises DataError that names what is missing."""
        lost = self.missing()
        if lost:
            raise DataError(f"{self._where} lacks {len(lost)} of {len(self.plan.ranges())} ranges, first {lost[0]}")
        parts = []
        for start, stop in self.plan.ranges():
            name = self.plan.name(start, stop)
            data = self._folder.get(name)
            if data is None:
                raise DataError(f"{name} went from {self._where} while it was committed")
            parts.append(
                {"name": name, "records": stop - start, "bytes": len(data), "sha256": files.sha256_bytes(data)}
            )
        facts = {**asdict(self.plan), "parts": parts}
        self._folder.write(COMMIT, _json(facts), replace=True)
        return facts


def read_commit(where: Uri) -> dict[str, Any] | None:
    """The commit list of a folder, or None when it has none."""
    found = open_folder(where).get(COMMIT)
    facts: dict[str, Any] | None = None if found is None else json.loads(found)
    return facts


def _json(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, sort_keys=True) + "\n").encode()

"""A folder that several machines share: records, each whole or absent, and logs that one process at a time writes.

It is on a disk that all of them mount, or in an object store. An object store has no append: there a log is objects
NAME.log.00000001, ... of what came together.
"""

import contextlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trueline import files
from trueline.errors import StorageError
from trueline.storage.location import Location, join_location, parse_location, split_location

_Record = TypeVar("_Record", bound=msgspec.Struct)


class SharedFolder:
    """Files by name, in folders below `where`. Its methods raise StorageError."""

    def __init__(self, where: Location) -> None:
        self.where = parse_location(where)
        if isinstance(self.where, Path):
            self.where = self.where.absolute()
        self._folders: dict[str, Any] = {}
        self._segments: dict[str, dict[str, bytes]] = {}

    @property
    def name(self) -> str:
        return split_location(self.where)[1]

    def _remote(self, folder: str) -> Any:
        if folder not in self._folders:
            from trueline.storage.folder import open_folder  # numpy, which a folder on a disk does not need

            self._folders[folder] = open_folder(join_location(self.where, folder) if folder else self.where)
        return self._folders[folder]

    def write(self, name: str, data: bytes, *, replace: bool = True) -> bool:
        """Whether it was written: without `replace` an existing file stays."""
        if isinstance(self.where, Path):
            path = self.where / name
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise files.storage_error(error, path.parent) from error
            return files.write_atomic(path, data, mode=0o600, replace=replace)
        folder, _, file = name.rpartition("/")
        return bool(self._remote(folder).write(file, data, replace=replace))

    def get(self, name: str) -> bytes | None:
        """None: there is no such file."""
        if isinstance(self.where, Path):
            try:
                return (self.where / name).read_bytes()
            except FileNotFoundError:
                return None
            except OSError as error:
                raise files.storage_error(error, self.where / name) from error
        folder, _, file = name.rpartition("/")
        data: bytes | None = self._remote(folder).get(file)
        return data

    def names(self, folder: str) -> set[str]:
        if isinstance(self.where, Path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return {
                    path.name for path in (self.where / folder).iterdir() if not path.name.startswith(files.PARTIAL)
                }
            return set()
        return set(self._remote(folder).names())

    def remove(self, name: str) -> None:
        if isinstance(self.where, Path):
            (self.where / name).unlink(missing_ok=True)
            return
        folder, _, file = name.rpartition("/")
        remote = self._remote(folder)
        with contextlib.suppress(FileNotFoundError):
            remote.fs.rm_file(f"{remote.root}/{file}")

    def append(self, name: str, data: bytes) -> None:
        """Adds to a log, which one process at a time writes."""
        if isinstance(self.where, Path):
            path = self.where / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with path.open("ab") as file:
                    file.write(data)
            except OSError as error:
                raise files.storage_error(error, path) from error
            return
        number = len(self._list_segments(name)) + 1
        self.write(f"{name}.{number:08d}", data)

    def read_log(self, name: str) -> bytes:
        """A log as far as it is written; empty where there is none."""
        if isinstance(self.where, Path):
            return self.get(name) or b""
        known = self._segments.setdefault(name, {})
        folder = name.rpartition("/")[0]
        for segment in self._list_segments(name):
            if segment not in known:
                known[segment] = self.get(f"{folder}/{segment}") or b""
        return b"".join(known[segment] for segment in sorted(known))

    def _list_segments(self, name: str) -> list[str]:
        folder, _, file = name.rpartition("/")
        return sorted(one for one in self.names(folder) if one.rpartition(".")[0] == file)

    def write_record(self, name: str, record: msgspec.Struct, *, replace: bool = True) -> bool:
        return self.write(name, msgspec.json.encode(record), replace=replace)

    def read_record(self, name: str, kind: type[_Record]) -> _Record | None:
        """None: there is none. Raises StorageError for one that is torn or of another version."""
        data = self.get(name)
        try:
            return None if data is None else msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise StorageError(f"{join_location(self.where, name)} cannot be read: {error}") from error

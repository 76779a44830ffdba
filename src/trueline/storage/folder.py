"""Files by name in a folder, local or in an object store, each whole or absent.

Several processes may write one folder. Of two that make a file the first has made it: on a disk by link(2), in a store
by a PUT with `If-None-Match: *` (RFC 9110, section 13.1.2). A folder tests whether its store honours this; where it
does not, it looks before it writes, and a writer that is suspended in between can still replace a file.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline import events, files
from trueline.errors import StorageError
from trueline.storage.location import Uri, is_remote, local_path
from trueline.storage.object_store import describe_error, open_store

TWICE = "_twice"
_TWICE = b"Written a second time by each writer at its start, to see whether this store refuses that.\n"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """Files by name, each whole or absent. Its methods raise StorageError."""

    path: Path

    def write(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        """Whether `data` was written: without `replace` an existing `name` stays."""
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
    """A LocalFolder in a store: an object exists once its PUT is done."""

    fs: Any
    root: str
    refuses: bool | None = field(default=None, init=False)
    """Whether the store refuses to overwrite an object; None until it was tested."""

    def write(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        path = f"{self.root}/{name}"
        if not replace and self.refuses is None:
            why = self._overwrites()
            self.refuses = not why
            if why:
                events.emit("store.overwrites", where=self.root, why=why)
        try:
            if not replace:
                # Also where the store refuses: it saves sending the object, and some stores know no condition for
                # objects in several parts.
                self.fs.invalidate_cache(self.root)
                if self.fs.exists(path):
                    return False
                if self.refuses:
                    return self._create(path, data)
            self.fs.pipe_file(path, data)
        except OSError as error:
            raise _store_error(path, error) from None
        return True

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(path, data, mode="create")
        except Exception as error:
            if not _is_conflict(error):
                raise
            return False
        return True

    def _overwrites(self) -> str:
        """Why the store does not refuse to overwrite; empty if it does. Tested on an object that nothing reads."""
        from fsspec import AbstractFileSystem

        if getattr(self.fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            return "its package has no conditional PUT, and only looks before it writes"
        try:
            twice = all(self._create(f"{self.root}/{TWICE}", _TWICE) for _ in range(2))
        except Exception as error:  # noqa: BLE001 - each package has its own error for a missing conditional PUT
            return describe_error(error)
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
    """s3fs raises FileExistsError for AWS's response only; Swift's 412, and the loser's response of two simultaneous
    writers, are in the cause."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    lost = response.get("Error", {}).get("Code") == "ConditionalRequestConflict"
    return isinstance(error, FileExistsError) or status == 412 or lost


def _store_error(where: str, error: OSError) -> StorageError:
    return StorageError(f"the store fails at {where}: {describe_error(error)}")


def open_folder(where: Uri) -> LocalFolder | StoreFolder:
    if not is_remote(where):
        return LocalFolder(local_path(where))
    fs, root = open_store(str(where))
    return StoreFolder(fs, root.rstrip("/"))

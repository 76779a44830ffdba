"""Checkpoints in a local folder, or in a folder of an object store that fsspec can reach.

    store    a folder                       runs/digits-1/checkpoints, s3://bucket/digits
    name     one checkpoint in it           step-00000120
    part     one file of a checkpoint       state.safetensors, checkpoint.json (the seal, which comes last)

A local checkpoint is whole or absent by rename. Object stores cannot rename a folder, but their PUT of one object is
atomic, so a checkpoint exists there once its seal does; parts without a seal are leftovers of a dead writer.
Implementations share `tests/conformance/checkpoint_store.py`.
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from trueline import files
from trueline.errors import StorageError, TruelineError
from trueline.storage.direct_file import DirectFile, Fill
from trueline.storage.location import Location, parse_location

Parts = Iterable[tuple[str, Iterable[bytes | memoryview] | Fill]]
"""Files with their content in pieces, or with what puts it where it is written from; in the order of writing."""

BLOCK_BYTES = 16 << 20
"""Sent to a store at once."""


class CheckpointStore(Protocol):
    def names(self, *, unfinished: bool = False) -> list[str]:
        """Complete checkpoints, sorted; or unfinished ones: of dead writers, or of some still at work."""
        ...

    def write(self, name: str, parts: Parts) -> None:
        """Writes `parts` as `name`, completely or not at all; replaces an older `name`. Raises StorageError."""
        ...

    def fetch(self, name: str, part: str) -> AbstractContextManager[Path]:
        """A local file with the part, until the block ends. Raises FileNotFoundError, StorageError."""
        ...

    def remove(self, name: str) -> None:
        """Removes `name` or its leftovers; a reader sees all of it or none. Raises StorageError."""
        ...


def open_checkpoint_store(location: Location, *, seal: str) -> CheckpointStore:
    """Raises StorageError when no library for the URL's store is installed."""
    folder = parse_location(location)
    return LocalCheckpointStore(folder) if isinstance(folder, Path) else RemoteCheckpointStore(folder, seal=seal)


class LocalCheckpointStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self, *, unfinished: bool = False) -> list[str]:
        names = (entry.name for entry in self.folder.glob("*") if entry.is_dir())
        return sorted(name for name in names if name.startswith(files.PARTIAL) == unfinished)

    def write(self, name: str, parts: Parts) -> None:
        with files.atomic_dir(self.folder / name, replace=True) as partial:
            for part, pieces in parts:
                with DirectFile((partial / part).open("wb", buffering=0)) as direct:
                    if callable(pieces):
                        direct.write_from(pieces)
                    else:
                        for piece in pieces:
                            direct.write(piece)
                    direct.flush()

    @contextmanager
    def fetch(self, name: str, part: str) -> Iterator[Path]:
        file = self.folder / name / part
        if not file.is_file():
            raise FileNotFoundError(str(file))
        yield file

    def remove(self, name: str) -> None:
        gone = self.folder / (name if name.startswith(files.PARTIAL) else f"{files.PARTIAL}{name}")
        try:
            if gone.name != name:
                shutil.rmtree(gone, ignore_errors=True)
                (self.folder / name).rename(gone)
        except FileNotFoundError:
            return
        except OSError as error:
            raise files.storage_error(error, self.folder / name) from error
        shutil.rmtree(gone, ignore_errors=True)


class RemoteCheckpointStore:
    """A folder of an object store. `seal` is the part without which a name does not exist."""

    def __init__(self, url: str, *, seal: str) -> None:
        import fsspec

        self.url, self.seal = url, seal
        with translate_errors(url, "opening"):
            self._fs, root = fsspec.url_to_fs(url)
        self._root = str(root).rstrip("/")

    def names(self, *, unfinished: bool = False) -> list[str]:
        with translate_errors(self.url, "listing"):
            self._fs.invalidate_cache()
            paths = [str(path)[len(self._root) + 1 :].split("/") for path in self._fs.find(self._root)]
        parts = {(path[0], path[1]) for path in paths if len(path) == 2}
        sealed = {name for name, part in parts if part == self.seal}
        return sorted({name for name, _ in parts} - sealed if unfinished else sealed)

    def write(self, name: str, parts: Parts) -> None:
        with translate_errors(self.url, f"writing {name} to"):
            self._unseal(name)
            try:
                for part, pieces in parts:
                    with self._fs.open(self._path(name, part), "wb", block_size=BLOCK_BYTES) as file:
                        for piece in _take_pieces(pieces) if callable(pieces) else pieces:
                            file.write(piece)
            except BaseException:
                with contextlib.suppress(Exception):  # the store may fail here too; a later sweep does it
                    self.remove(name)
                raise

    @contextmanager
    def fetch(self, name: str, part: str) -> Iterator[Path]:
        with files.TemporaryFolder("state") as scratch:
            file = scratch / part
            with translate_errors(self.url, f"reading {name} of", missing_is_fine=True):
                self._fs.get_file(self._path(name, part), str(file))
            yield file

    def remove(self, name: str) -> None:
        with translate_errors(self.url, f"removing {name} of"):
            self._unseal(name)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path(name), recursive=True)

    def _unseal(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, self.seal))

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))


def _take_pieces(fill: Fill) -> Iterator[memoryview]:
    room = memoryview(bytearray(BLOCK_BYTES))
    while count := fill(room):
        yield room[:count]


@contextmanager
def translate_errors(url: str, doing: str, *, missing_is_fine: bool = False) -> Iterator[None]:
    """Raises errors of a store's library, whatever their class, as StorageError."""
    try:
        yield
    except TruelineError:
        raise
    except Exception as error:
        if missing_is_fine and isinstance(error, FileNotFoundError):
            raise
        why = (str(error).strip() or "no reason given").splitlines()[0]
        message = f"{doing} {url} failed: {type(error).__name__}: {why}"
        raise StorageError(message, hint=_hint(url, error)) from error


def _hint(url: str, error: Any) -> str:
    scheme = url.partition("://")[0]
    words = type(error).__name__.lower() + str(error).lower()
    if isinstance(error, ImportError):
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
        return f"pip install 'trueline[{extra}]'" if extra else f"install the fsspec library for {scheme}://"
    if isinstance(error, ValueError) and "protocol" in words:
        return "write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or a local folder"
    if isinstance(error, FileNotFoundError):
        return "create the bucket, or correct the URL"
    if isinstance(error, PermissionError) or any(word in words for word in ("credential", "denied", "forbidden")):
        return "give this machine the store's credentials (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
    return "when the store answers again, try again; a training job does so at its next checkpoint"

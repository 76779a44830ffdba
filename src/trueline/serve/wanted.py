"""What a server is to serve, as one file: read at start, written whole after each act.

The file is the memory of who manages the server: a restart brings back every version, the defaults and the splits. It
says where a version came from and which bytes it had; a bundle that was exchanged since then is refused.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from trueline import files
from trueline.errors import StorageError, UsageError


class WantedVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One version: its source, the digest that it had when it was loaded, and how many runs go on at once."""

    source: str
    digest: str
    workers: int = 1
    max_batch: int | None = None
    max_delay_s: float | None = None
    given: dict[str, str] = {}
    """What the call said of an archive's workers, in TorchServe's words."""


class WantedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model."""

    versions: dict[str, WantedVersion]
    default: str
    split: dict[str, float] = {}


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: int = 1
    models: dict[str, WantedModel] = {}


def read(path: Path) -> Wanted:
    """The file at `path`; nothing wanted when there is none. Raises UsageError when it is no such file."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Wanted)
    except FileNotFoundError:
        return Wanted()
    except OSError as error:
        raise UsageError(f"cannot read the state file {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} is no state file of a server: {error}", hint="mend it, or delete it to begin with nothing"
        ) from error
    if found.schema != 1:
        raise UsageError(
            f"{path} has schema {found.schema}, this server reads 1", hint="use the Trueline that wrote it"
        )
    for name, model in found.models.items():
        unknown = [version for version in (model.default, *model.split) if version not in model.versions]
        if unknown:
            raise UsageError(f"{path} names version '{unknown[0]}' of '{name}', which it does not list")
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else reads and writes the file meanwhile who asks for this too. Raises StorageError."""
    beside = path.with_name(path.name + ".lock")
    try:
        lock = beside.open("ab")
    except OSError as error:
        raise StorageError(f"cannot write {beside}: {error.strerror or error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, wanted: Wanted) -> None:
    """Raises StorageError; the file is then as it was."""
    files.write_atomic(path, msgspec.json.format(msgspec.json.encode(wanted), indent=2) + b"\n")

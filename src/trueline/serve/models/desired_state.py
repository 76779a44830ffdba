"""What a server is to serve, as one file: read at start, written whole after each act.

The file is the memory of who manages the server: a restart brings back every version, the defaults and the splits. It
says where a version came from and which bytes it had; a bundle that was exchanged since then is refused.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

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


class WantedWorkflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One workflow: its archive, and the digests of the archives of its models by node."""

    source: str
    digest: str
    models: dict[str, str] = {}
    given: dict[str, str] = {}
    """What the call said of its workers, in TorchServe's words."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: int = 1
    models: dict[str, WantedModel] = {}
    workflows: dict[str, WantedWorkflow] = {}


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
    told = {name: value for name, value in msgspec.structs.asdict(wanted).items() if name != "workflows" or value}
    files.write_atomic(path, msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")


class Keeper:
    """One part of the file as one process changes it: by name, and what others wrote stays."""

    def __init__(self, state: Path | None, part: Literal["models", "workflows"]) -> None:
        """`state` is the file, if there is to be one."""
        self._state = state
        self._part = part
        self._kept: dict[str, _Kept] = {}
        self._following: set[str] = set()

    def keep(self, mine: Mapping[str, _Kept]) -> None:
        """Writes what of `mine` has changed since it was last written. Raises StorageError, UsageError."""
        if self._state is None:
            return
        changed = {name for name in {*mine, *self._kept} if mine.get(name) != self._kept.get(name)} - self._following
        if not changed:
            return
        with locked(self._state):
            whole = read(self._state)
            part = {name: one for name, one in getattr(whole, self._part).items() if name not in changed}
            part |= {name: mine[name] for name in mine if name in changed}
            write(self._state, msgspec.structs.replace(whole, **{self._part: part}))
        self._remember(changed, mine)

    def _remember(self, names: Iterable[str], mine: Mapping[str, _Kept]) -> None:
        for name in names:
            self._kept.pop(name, None)
            if name in mine:
                self._kept[name] = mine[name]

    @contextmanager
    def following(self, name: str, mine: Callable[[], Mapping[str, _Kept]]) -> Iterator[None]:
        """While `name` is brought to what the file says, the file is not written for it."""
        self._following.add(name)
        try:
            yield
        finally:
            self._following.discard(name)
            self._remember([name], mine())


_Kept = WantedModel | WantedWorkflow

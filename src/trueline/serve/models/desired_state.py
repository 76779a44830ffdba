"""The state file: which versions, defaults and splits a server is to serve. Read at start, written after each change.

It records each version's source and digest; a bundle that was replaced since then is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from trueline import files
from trueline.errors import StorageError, UsageError


class DesiredVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    source: str
    digest: str
    workers: int = 1
    max_batch: int | None = None
    max_delay_s: float | None = None
    given: dict[str, str] = {}  # TorchServe's registration parameters of an archive


class DesiredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    versions: dict[str, DesiredVersion]
    default: str
    split: dict[str, float] = {}


class DesiredWorkflow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    source: str
    digest: str
    models: dict[str, str] = {}  # digests of its nodes' archives
    given: dict[str, str] = {}


class DesiredState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: int = 1
    models: dict[str, DesiredModel] = {}
    workflows: dict[str, DesiredWorkflow] = {}


def read(path: Path) -> DesiredState:
    """The state in the file at `path`; empty if there is none. Raises UsageError for a file of another form."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=DesiredState)
    except FileNotFoundError:
        return DesiredState()
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
def lock_file(path: Path) -> Iterator[None]:
    """Excludes other processes that lock the file, too. Raises StorageError."""
    beside = path.with_name(path.name + ".lock")
    with ExitStack() as held:
        try:
            held.enter_context(files.hold_lock(beside))
        except OSError as error:
            raise StorageError(f"cannot write {beside}: {error.strerror or error}") from error
        yield


def write(path: Path, state: DesiredState) -> None:
    """Raises StorageError; the file is then unchanged."""
    kept = {name: value for name, value in msgspec.structs.asdict(state).items() if name != "workflows" or value}
    files.write_atomic(path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n", mode=0o600)


class Keeper:
    """Writes one part of the file, and only the names that this process changed."""

    def __init__(self, state: Path | None, part: Literal["models", "workflows"]) -> None:
        """`state`: None writes nothing."""
        self._state, self._part = state, part
        self._kept: dict[str, _Kept] = {}
        self._following: set[str] = set()

    def keep(self, mine: Mapping[str, _Kept]) -> None:
        """Writes what has changed in `mine` since the last call. Raises StorageError, UsageError."""
        if self._state is None:
            return
        changed = {name for name in {*mine, *self._kept} if mine.get(name) != self._kept.get(name)} - self._following
        if not changed:
            return
        with lock_file(self._state):
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
        """Inside, the file is not written for `name`."""
        self._following.add(name)
        try:
            yield
        finally:
            self._following.discard(name)
            self._remember([name], mine())


_Kept = DesiredModel | DesiredWorkflow

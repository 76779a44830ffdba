"""The store of a job: what its head, its hosts and every client find there. The only module that knows its files.

    STORE/JOB/submitted.json      what was submitted          .../launches/0001.json         engine, workers
    .../files/SHA-256             the recipe's folder         .../launches/0001.end.json     how it ended
    .../orders/ORDER.json, .done  scale, halt; the answer     .../launches/0001.status.json  how it is
    .../kept/                     settings, journal, columns  .../launches/0001.join.json    for its hosts: a secret
    .../kept/cuts/                parts of parameter servers
    .../logs/NAME.log             output of every process     .../logs/events.log            what happened
    .../checkpoints/              as the job writes them

A launch, its end and a job's name are files that can be made once, so that of two clients one is first. An object store
has no append: there a log is objects NAME.log.00000001, ... of what came together.
"""

import contextlib
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trueline import files
from trueline.engine.cluster.settings import AnySettings
from trueline.engine.hosts.messages import TravelledFile
from trueline.engine.hosts.token import TokenFile
from trueline.errors import StorageError, UsageError
from trueline.storage.location import Location, join_location, parse_location, split_location
from trueline.train.job_dir import Outcome

_Record = TypeVar("_Record", bound=msgspec.Struct)


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """`recipe`: its path among `files`, below the folder of the code, or `module:object`. Times are seconds since
    1970."""

    name: str
    id: str
    """Random: another store may have a job of this name, on the same scheduler."""
    recipe: str
    files: tuple[TravelledFile, ...]
    workers: str
    settings: dict[str, Any]
    priority: int = 0
    submitted: float
    script: tuple[str, ...] = ()
    """Of a loop of its own, in place of `recipe`: its path among `files`, and its arguments."""
    servers: int = 0
    """Parameter servers. A job with some runs as a whole beside its head: they are not reached from other hosts."""
    manifest: dict[str, Any] = {}
    """Of a job of scripts: what its learners run, as `train/learners/manifest` has read it. It has no recipe then."""

    @property
    def unique_name(self) -> str:
        """The job in the names of its submissions."""
        return f"{self.name}-{self.id}"


class JobLaunch(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    on: str
    """The engine as it was typed: slurm:staging."""
    engine: AnySettings
    workers: str = ""
    """Of a resumed job that gets others; empty: as before."""
    machine: str = ""
    """Name of the machine that has it, of an engine that is one machine."""
    submitted: float


class LaunchEnd(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    why: str
    step: int = 0
    total: int = 0
    checkpoint: int = 0
    ended: float


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    state: str
    """queued, starting, here, away or leaving."""
    reason: str = ""
    workers: int = 0


class LaunchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a launch is, as the leader of the job writes it about once a second."""

    leader: str
    host: str
    step: int = 0
    total: int = 0
    loss: float | None = None
    workers: int = 0
    target: int = 0
    checkpoint: int = 0
    core_s: float = 0.0
    """Seconds that slots were held, summed over them."""
    next_host: int = 1
    hosts: tuple[HostStatus, ...] = ()
    at: float


class JoinKit(msgspec.Struct, frozen=True, kw_only=True):
    """What a host needs to join: where the head's master listens, and the token of the launch."""

    address: str
    token: TokenFile


class Order(msgspec.Struct, frozen=True, kw_only=True):
    workers: int = 0
    """0: the job is to halt."""
    why: str
    given: float


class OrderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    fault: str = ""


class JobStore:
    """Files of one job, each whole or absent. Its methods raise StorageError."""

    def __init__(self, where: Location) -> None:
        self.where = parse_location(where)
        if isinstance(self.where, Path):
            self.where = self.where.absolute()
        self._folders: dict[str, Any] = {}
        self._segments: dict[str, dict[str, bytes]] = {}

    @property
    def name(self) -> str:
        return split_location(self.where)[1]

    @property
    def checkpoints(self) -> str:
        return str(join_location(self.where, "checkpoints"))

    def _remote(self, folder: str) -> Any:
        if folder not in self._folders:
            from trueline.data.tools.writer import open_folder  # pyarrow, which a store on a disk does not need

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

    def read_job(self) -> SubmittedJob:
        """Raises UsageError where there is no job."""
        job = self.read_record("submitted.json", SubmittedJob)
        if job is None:
            raise UsageError(f"{self.where} holds no job", hint="`trueline jobs --store STORE` lists those of a store")
        return job

    def last_launch(self) -> JobLaunch | None:
        numbers = [name[:4] for name in self.names("launches") if len(name) == len("0001.json")]
        return self.read_record(f"launches/{max(numbers)}.json", JobLaunch) if numbers else None

    def begin_launch(self, launch: JobLaunch) -> bool:
        """False: another client has begun this one."""
        return self.write_record(f"launches/{launch.number:04d}.json", launch, replace=False)

    def read_end(self, number: int) -> LaunchEnd | None:
        return self.read_record(f"launches/{number:04d}.end.json", LaunchEnd)

    def end_launch(self, number: int, end: LaunchEnd) -> bool:
        """False: its end is written."""
        self.remove(_join_file(number))
        return self.write_record(f"launches/{number:04d}.end.json", end, replace=False)

    def read_status(self, number: int) -> LaunchStatus | None:
        return self.read_record(f"launches/{number:04d}.status.json", LaunchStatus)

    def write_status(self, number: int, status: LaunchStatus) -> None:
        self.write_record(f"launches/{number:04d}.status.json", status)

    def read_kit(self, number: int) -> JoinKit | None:
        return self.read_record(_join_file(number), JoinKit)

    def write_kit(self, number: int, kit: JoinKit) -> None:
        self.write_record(_join_file(number), kit)

    def keep_kit(self, number: int, kit: JoinKit) -> None:
        """Writes it where another one is, unless the launch has ended."""
        if self.read_kit(number) != kit and self.read_end(number) is None:
            self.write_kit(number, kit)

    def give_order(self, number: int, order: Order) -> str:
        """Returns the name under which its answer will be."""
        name = f"{number:04d}-{time.time_ns()}"
        self.write_record(f"orders/{name}.json", order)
        return name

    def list_orders(self, number: int) -> list[tuple[str, Order]]:
        """Orders of a launch that have no answer, the oldest first."""
        names = self.names("orders")
        found = []
        for file in sorted(names):
            name = file.removesuffix(".json")
            if file.endswith(".json") and name.startswith(f"{number:04d}-") and f"{name}.done" not in names:
                order = self.read_record(f"orders/{file}", Order)
                if order is not None:
                    found.append((name, order))
        return found

    def answer_order(self, name: str, answer: OrderAnswer) -> None:
        self.write_record(f"orders/{name}.done", answer)

    def read_answer(self, name: str) -> OrderAnswer | None:
        return self.read_record(f"orders/{name}.done", OrderAnswer)


def _join_file(number: int) -> str:
    return f"launches/{number:04d}.join.json"

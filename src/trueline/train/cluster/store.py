"""The store of a job: what its head, its hosts and every client find there. The only module that knows its files.

    STORE/JOB/submitted.json      what was submitted          .../launches/0001.json         engine, workers
    .../files/SHA-256             the recipe's folder         .../launches/0001.end.json     how it ended
    .../orders/ORDER.json, .done  scale, halt; the answer     .../launches/0001.status.json  how it is
    .../kept/                     settings, journal, columns  .../launches/0001.join.json    for its hosts: a secret
    .../kept/cuts/                parts of parameter servers
    .../logs/NAME.log             output of every process     .../logs/events.log            what happened
    .../checkpoints/              as the job writes them

A launch, its end and a job's name are files that can be made once, so that of two clients one is first.
"""

import time
from typing import Any

import msgspec

from trueline.engine.cluster.settings import AnySettings
from trueline.engine.hosts.messages import TravelledFile
from trueline.engine.hosts.token import TokenFile
from trueline.errors import UsageError
from trueline.storage.location import join_location
from trueline.storage.shared_folder import SharedFolder
from trueline.train.job_dir import Outcome


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


class JobStore(SharedFolder):
    """Files of one job, each whole or absent. Its methods raise StorageError."""

    @property
    def checkpoints(self) -> str:
        return str(join_location(self.where, "checkpoints"))

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

"""What a worker asks its master, in msgpack over gRPC: minibatches, their commits, the routing of the servers."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec
from msgspec import Struct

from trueline.errors import DiskFull, TrainError
from trueline.ps.dial import ServerAddress, read_address
from trueline.ps.messages import ModelSpec, Routing
from trueline.train.link.grpc_client import FENCED_EXIT, RECONNECTING, open_channel

SERVICE = "trueline.ps.v1.Tasks"
BEAT_S, LOCATE_S = 0.5, 1.0
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
"""Of a call that needs room on a full disk."""
_T = TypeVar("_T")


class Join(Struct, frozen=True, array_like=True):
    ref: str
    spec: ModelSpec
    num_records: int
    blocks: tuple[int, ...] = ()


class Joined(Struct, frozen=True, array_like=True):
    """The servers are there, and hold a model of this spec. `parts`: minibatches of a step, for the whole job."""

    routing: Routing
    parts: int = 1


class Described(Struct, frozen=True, array_like=True):
    spec: ModelSpec
    routing: Routing


class LeaseRequest(Struct, frozen=True, array_like=True):
    ref: str
    wait_s: float
    """How long the master may wait until a minibatch may begin."""


class LeaseReply(Struct, frozen=True, array_like=True):
    """Minibatches [start, stop) of `epoch`; none: ask again, unless the job is `finished`."""

    token: int = 0
    epoch: int = 0
    start: int = 0
    stop: int = 0
    step: int = 0
    """Steps of the job that are committed."""
    finished: bool = False


class Computed(Struct, frozen=True, array_like=True):
    minibatch: int
    records: int
    loss: float
    norm: float
    lr: float
    data_ms: float
    compute_ms: float
    wait_ms: float


class CommitRequest(Struct, frozen=True, array_like=True):
    """Minibatches before `upto` were acknowledged by every server."""

    ref: str
    token: int
    epoch: int
    upto: int
    computed: tuple[Computed, ...]
    at_ns: int


class WorkerCall(Struct, frozen=True, array_like=True):
    ref: str
    memory: int = 0


class Failed(Struct, frozen=True, array_like=True):
    ref: str
    code: str
    why: str
    detail: str


class LocateServer(Struct, frozen=True, array_like=True):
    ref: str
    server: str


class LocatedServer(Struct, frozen=True, array_like=True):
    """Where a server listens for other hosts; None: not yet."""

    address: ServerAddress | None


class Answer(Struct, frozen=True, array_like=True):
    ok: bool = True


def locate_server(job_dir: Path, server: str) -> LocatedServer:
    """For a worker on another host: a path of this one's file system may lead elsewhere there."""
    address = read_address(job_dir, server)
    return LocatedServer(None if address is None else msgspec.structs.replace(address, unix=""))


class TasksLink:
    """A worker's calls. They wait for a master that is away; a worker that was given up ends at once."""

    service = SERVICE

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self._channel = open_channel(os.environ["TRUELINE_MASTER"], RECONNECTING)
        self._metadata = (("authorization", f"Bearer {os.environ['TRUELINE_SECRET']}"),)
        self._ended = threading.Event()
        self._located: dict[str, ServerAddress | None] = {}

    def _call(self, name: str, request: object, of: type[_T], timeout_s: float | None = None) -> _T:
        channel: Any = self._channel
        call = channel.unary_unary(f"/{self.service}/{name}")
        while True:
            try:
                reply: bytes = call(
                    msgspec.msgpack.encode(request), metadata=self._metadata, wait_for_ready=True, timeout=timeout_s
                )
                return msgspec.msgpack.decode(reply, type=of)
            except grpc.RpcError as error:
                code = error.code()
                if code is grpc.StatusCode.FAILED_PRECONDITION:
                    sys.stderr.write(f"{self.ref} ends: {error.details()}\n")
                    sys.stderr.flush()
                    os._exit(FENCED_EXIT)
                if code is FULL:
                    raise DiskFull(str(error.details())) from error
                if code is not grpc.StatusCode.UNAVAILABLE:
                    raise TrainError(f"the master refused {name}: {error.details()}") from error

    def join(self, spec: ModelSpec, num_records: int, blocks: tuple[int, ...]) -> Joined:
        """Returns when all servers hold the model."""
        return self._call("Join", Join(self.ref, spec, num_records, blocks), Joined)

    def lease(self, wait_s: float) -> LeaseReply:
        return self._call("Lease", LeaseRequest(self.ref, wait_s), LeaseReply)

    def commit(self, commit: CommitRequest) -> bool:
        return self._call("Commit", commit, Answer).ok

    def route(self) -> Routing:
        return self._call("Route", WorkerCall(self.ref), Joined).routing

    def describe(self) -> tuple[ModelSpec, Routing]:
        """Returns when all servers hold the model."""
        found = self._call("Describe", WorkerCall(self.ref), Described)
        return found.spec, found.routing

    def find_servers(self, job_dir: Path) -> Callable[[str], ServerAddress | None]:
        """Gives where a server listens: as its folder says, or on a host that has joined, as the master says."""
        return self._locate if os.environ.get("TRUELINE_CA") else lambda server: read_address(job_dir, server)

    def _locate(self, server: str) -> ServerAddress | None:
        with contextlib.suppress(TrainError):  # the master is away; what it said before still holds
            found = self._call("Locate", LocateServer(self.ref, server), LocatedServer, LOCATE_S)
            self._located[server] = found.address
        return self._located.get(server)

    def leave(self) -> None:
        self._call("Leave", WorkerCall(self.ref), Answer)

    def fail(self, code: str, why: str, detail: str) -> None:
        self._call("Fail", Failed(self.ref, code, why, detail), Answer)

    def begin_beats(self, memory: Callable[[], int]) -> None:
        """Tells the master every BEAT_S that this worker lives, in a thread."""

        def beat() -> None:
            while not self._ended.wait(BEAT_S):
                self._call("Beat", WorkerCall(self.ref, memory()), Answer)

        threading.Thread(target=beat, name="beat", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

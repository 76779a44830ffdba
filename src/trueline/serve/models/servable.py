"""What the server knows of a version of a model, whether a bundle's program or a handler answers its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trueline.errors import NotReady, Overloaded, RequestError
from trueline.serve.batching.policy import USUAL, Policy
from trueline.serve.counters import VersionStats
from trueline.serve.fastpath.fast_path import CachedProgram
from trueline.serve.tensors.bounds import UNBOUNDED, RequestBounds
from trueline.web.body import Body

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from trueline.bundle.signature import Array, Signature
    from trueline.columns.fitted import FittedColumns
    from trueline.runtime.session import Session
    from trueline.serve.batching.execution_plan import ExecutionPlan
    from trueline.web.messages import StreamedBody

    Outputs = dict[str, Array]

State = Literal["loading", "ready", "failed", "retiring"]
NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
    "inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)
"""TorchServe's message for a model that is scaled to zero workers."""
NO_WORKERS = "it has no worker; scale it to one or more (PUT /models/{m}/{v}?min_worker=1)"
LOADING_S = 1.0
"""The Retry-After of a version that loads; most are ready within it."""
RETRY_S = 10.0
"""Until what failed for a reason that may pass is loaded again: a full disk, no memory, a store that did not answer."""


class TooManyWorkers(RequestError):
    """More workers, or runs at a time, than the server has room for; the message has both numbers."""

    code = "too_many_workers"
    torchserve_type = "BadRequestException"


class NoTensors(RequestError):
    """A handler takes and returns its own formats, not tensors."""

    code = "no_tensors"

    def __init__(self, model: str) -> None:
        super().__init__(f"model '{model}' is answered by a handler and declares no tensors; ask /predictions/{model}")


@dataclass(slots=True, eq=False, kw_only=True)
class HandlerRequest:
    """One request for a handler: its parts (name, content type, bytes) and headers."""

    request_id: str
    parts: Sequence[tuple[str, str, Body]]
    headers: Mapping[str, str]
    on_piece: Callable[[HandlerAnswer], None] | None = None
    """Called with each piece that the handler sends before the whole answer."""

    @property
    def num_bytes(self) -> int:
        return sum(len(part[2]) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerAnswer:
    """A handler's answer to one request, or one piece of it. Header names are lower-case and include the content type.

    A streamed answer has its pieces in `pieces`; its status and headers are those of the first piece.
    """

    body: bytes | bytearray
    status: int = 200
    phrase: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: StreamedBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A program that reproduced its golden records, and how it is run."""

    session: Session
    digest: str
    platform: str
    golden_cases: int
    plan: ExecutionPlan
    bounds: RequestBounds = UNBOUNDED
    """Of one request."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that it answers, as nested lists by name: those of its smallest golden record that is short enough to
    read. Empty if there is none."""
    columns: FittedColumns | None = None
    """How records become its inputs; None: requests are tensors."""
    records: Sequence[Mapping[str, Any]] = ()
    """With `columns`: records that it answers, by column name."""


class Handler(Protocol):
    """Answers whole requests in processes of its own. Its properties raise NotReady.

    `parameters` and `description` are for the model metadata of the Open Inference Protocol and of TorchServe.
    """

    @property
    def stateful(self) -> bool: ...
    @property
    def parameters(self) -> dict[str, Any]: ...
    @property
    def description(self) -> dict[str, Any]: ...

    def handle(self, ask: HandlerRequest, *, alone: bool = False, loose: bool = False) -> asyncio.Future[HandlerAnswer]:
        """`alone`: in a batch of its own; `loose`: outside of any sequence. Raises RequestError."""

    def collect(self, host: str) -> Iterator[Metric]:
        """The metrics that its code counted, labelled with the name of the `host`."""

    async def wait_ready(self) -> None:
        """Returns when the workers of the last `scale` are ready. Raises NotStarted."""

    async def close(self) -> None:
        """Ends the processes at once."""


class Program(CachedProgram, Protocol):
    """Answers tensors. Its properties raise NotReady."""

    @property
    def loaded(self) -> Loaded: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def bounds(self) -> RequestBounds: ...
    @property
    def columns(self) -> FittedColumns | None: ...

    def no_room(self, priority: int) -> Overloaded | None:
        """Why a request of `priority` is rejected now; the same object until the queue changes."""


class Servable(Protocol):
    """A version of a model that answers requests: `ask` takes tensors, `handler` takes whole requests.

    Call all methods on the loop. `handler` is None for a version that takes tensors; for others `program` and `ask`
    raise NoTensors. `digest` (of the loaded bytes) and `policy` raise NotReady. `obstacle`: why a request would not be
    answered now; empty if it would. `optional`: the server is ready without it, because no client relies on it yet.
    `passing`: it failed, and is loaded again after RETRY_S.
    `sick`: it cannot answer, will not recover by itself, and is not optional. `full`: its queue accepts a request only
    in place of a less urgent one. `load_times`: seconds from start to ready by TorchServe's names of workers.
    """

    model: str
    version: str
    state: State
    reason: str
    source: str
    workflow: str
    at_start: bool
    optional: bool
    passing: bool
    since: float
    load_s: float
    stats: VersionStats

    @property
    def handler(self) -> Handler | None: ...
    @property
    def obstacle(self) -> str: ...
    @property
    def program(self) -> Program: ...
    @property
    def digest(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def sick(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def full(self) -> bool: ...
    @property
    def load_times(self) -> dict[str, float]: ...

    def check_ready(self) -> None:
        """Raises NotReady."""

    def ask(
        self, inputs: Mapping[str, Array], timeout_s: float | None = None, priority: int = USUAL
    ) -> Outputs | asyncio.Future[Outputs]:
        """The outputs, immediately if the run is short, else a future. Raises RequestError."""

    def scale(self, lanes: int) -> None:
        """Sets the number of runs or workers. With 0, new requests are rejected; waiting ones are answered."""

    async def retire(self) -> None:
        """Returns when the last accepted request is answered, and releases what was loaded.

        Call it when Models no longer finds the version.
        """


@dataclass(slots=True, eq=False, kw_only=True)
class VersionRecord:
    """What is known of a version, whatever answers its requests."""

    model: str
    version: str
    state: State = "loading"
    reason: str = ""  # why it failed, for clients to read
    source: str = ""  # its source as the request or the state file named it
    workflow: str = ""  # the workflow that it is a node of; it is loaded and retired with that alone
    at_start: bool = False  # whether it was loaded before the server was ready
    optional: bool = False  # found in a store or registered without workers, and never able to answer yet
    passing: bool = False  # it failed for a reason of the server that may pass: it is loaded again after RETRY_S
    since: float = 0.0  # when it became ready, in seconds since the epoch
    load_s: float = 0.0
    stats: VersionStats = field(default_factory=VersionStats)

    def check_ready(self) -> None:
        if self.state != "ready":
            raise self.not_ready()

    def not_ready(self) -> NotReady:
        why = f": {self.reason}" if self.reason else ""
        wait_s = LOADING_S if self.state == "loading" else RETRY_S if self.passing else None
        return NotReady(f"model '{self.model}' version '{self.version}' is {self.state}{why}", retry_after_s=wait_s)

    def fail(self, reason: str) -> None:
        self.state, self.reason = "failed", reason

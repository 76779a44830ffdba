"""A worker's side of the servers: rows by id and dense parameters by name, split by owner and put together again.

One thread moves the bytes of all connections, so that the rows of the next minibatch come and gradients leave while
this one is computed. A server that dies is waited for: what it has not acknowledged is sent again to its next
incarnation, which applies each minibatch once. When the routing has changed, what a server refused is split again.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import numpy as np

from trueline.errors import TrainError, TruelineError
from trueline.ps.dial import ServerAddress
from trueline.ps.gradients import Gradients, Key, Pulled
from trueline.ps.messages import DensePart, Routing
from trueline.ps.partition import Ids
from trueline.ps.peers import PeerRequest, Peers
from trueline.ps.split import IdSplit, Rows, empty_dense, name_part, narrow, parts_of, slice_dense, split_ids, widen
from trueline.ps.wire import (
    Array,
    Call,
    Failure,
    Inbox,
    Initialize,
    PullReply,
    PullRequest,
    PushRequest,
    ReceivedFrame,
    Squares,
    SquaresRequest,
    rebuild_failure,
)

PAUSE_S = 0.05


class PsClient:
    """The servers of a job, for one worker. Methods may be called from one thread.

    `addresses` gives where the server with a ref listens now; `on_routing` asks the master for the present routing, and
    is called from a thread of its own. `half` sends rows as float16. `outstanding` pushes may be without
    acknowledgement. `notify`, if it is set, is called at each acknowledgement, in a thread that must not wait.
    """

    def __init__(
        self,
        addresses: Callable[[str], ServerAddress | None],
        routing: Routing,
        secret: bytes,
        *,
        half: bool = False,
        outstanding: int = 2,
        on_routing: Callable[[], Routing] | None = None,
    ) -> None:
        self.routing, self.half, self._outstanding = routing, half, outstanding
        self.notify: Callable[[], None] | None = None
        self._peers = Peers(addresses, secret)
        self._changed = threading.Condition()
        self._open: dict[Key, _Push] = {}
        self._acknowledged: list[Key] = []
        self._refused: list[tuple[Key, TruelineError]] = []
        self.refused: Key | None = None
        """Of the push whose refusal was raised."""
        self._pulls: set[_Pull] = set()
        self.row_bytes: dict[str, int] = {}
        """Of a row as it travels, by table."""
        self._router = _Router(self, on_routing)

    def start_pull(self, tables: Mapping[str, Ids], dense: bool = True, *, averaged: bool = False) -> "Future[Pulled]":
        """Asks for the rows of unique int64 ids, or their averages, and for all dense values; it waits for servers that
        are away."""
        pull = _Pull(self, tables, dense, averaged)
        with self._changed:
            self._pulls.add(pull)
        pull.send()
        return pull.future

    def pull(
        self, tables: Mapping[str, Ids], dense: bool = True, timeout_s: float | None = None, *, averaged: bool = False
    ) -> Pulled:
        """Raises TimeoutError, which names the servers that are away."""
        try:
            return self.start_pull(tables, dense, averaged=averaged).result(timeout_s)
        except TimeoutError:
            raise TimeoutError(self._describe_wait("rows", timeout_s)) from None

    def push(self, gradients: Gradients) -> None:
        """Sends gradients to all servers and returns, unless `outstanding` of them wait for their acknowledgement.

        Raises the TruelineError of a push that was refused, this or an earlier one.
        """
        with self._changed:
            while len(self._open) >= self._outstanding and not self._refused:
                self._changed.wait()
            self._raise_refused()
            push = self._open[gradients.key] = _Push(self, gradients)
        push.send()

    def take_acknowledged(self) -> list[Key]:
        """Epoch and minibatch of the pushes that all servers have acknowledged since the last call."""
        with self._changed:
            self._raise_refused()
            keys, self._acknowledged = self._acknowledged, []
        return keys

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for an acknowledgement; whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._acknowledged or self._refused), timeout_s)
            self._raise_refused()
            return bool(self._acknowledged)

    def drain(self, timeout_s: float | None = None) -> None:
        """Waits until nothing is outstanding. Raises TimeoutError, and what a server refused."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open or bool(self._refused), timeout_s):
                raise TimeoutError(self._describe_wait("acknowledgements", timeout_s))
            self._raise_refused()

    def initialize(self, dense: Mapping[str, Rows], timeout_s: float | None = None) -> None:
        """Gives the servers the dense values of a new job; what they have already stays."""
        futures = []
        for index, ref in enumerate(self.routing.servers):
            future: Future[None] = Future()
            parts = parts_of(self.routing, index)
            body, arrays = Initialize(tuple(name_part(part) for part in parts)), slice_dense(parts, dense)
            futures.append(future)
            self._peers.submit([PeerRequest(ref, Call.INITIALIZE, body, arrays, functools.partial(_settle, future))])
        for future in futures:
            try:
                future.result(timeout_s)
            except TimeoutError:
                raise TimeoutError(self._describe_wait("acknowledgements", timeout_s)) from None

    def sum_squares(self, epoch: int, minibatch: int) -> float:
        """Of the gradients of rows that the servers have of a step whose `scale` is not pushed yet."""
        futures = []
        for ref in self.routing.servers:
            future: Future[float] = Future()
            futures.append(future)
            body = SquaresRequest(epoch, minibatch)
            self._peers.submit([PeerRequest(ref, Call.SQUARES, body, [], functools.partial(_take_squares, future))])
        return sum(future.result() for future in futures)

    def close(self) -> None:
        """What is outstanding is forgotten; pulls that wait raise ConnectionError."""
        self._router.close()
        self._peers.close()
        for pull in list(self._pulls):
            self.finish_pull(pull, ConnectionError("the client was closed"))

    def _describe_wait(self, what: str, timeout_s: float | None) -> str:
        return f"no {what} within {timeout_s} s; {self._peers.trouble or 'the servers are there, and busy'}"

    def _raise_refused(self) -> None:
        if self._refused:
            self.refused, error = self._refused.pop(0)
            raise error

    # for the operations, in the thread of the connections

    def send_all(self, requests: list[PeerRequest]) -> None:
        self._peers.submit(requests)

    def stall(self, operation: "_Pull | _Push") -> None:
        self._router.add(operation)

    def finish_pull(self, pull: "_Pull", result: Pulled | Exception) -> None:
        with self._changed:
            self._pulls.discard(pull)
        if pull.future.set_running_or_notify_cancel():
            if isinstance(result, Pulled):
                pull.future.set_result(result)
            else:
                pull.future.set_exception(result)

    def finish_push(self, key: Key, error: TruelineError | None) -> None:
        with self._changed:
            if self._open.pop(key, None) is None:
                return
            if error is None:
                self._acknowledged.append(key)
            else:
                self._refused.append((key, error))
            self._changed.notify_all()
        if self.notify is not None:
            self.notify()


def _settle(future: "Future[None]", frame: ReceivedFrame | None, failure: Failure | None, inbox: Inbox) -> None:
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(rebuild_failure(failure))


def _take_squares(future: "Future[float]", frame: ReceivedFrame | None, failure: Failure | None, inbox: Inbox) -> None:
    if frame is not None:
        future.set_result(frame.read(Squares).value)
    else:
        assert failure is not None
        future.set_exception(rebuild_failure(failure))


class _Pull:
    """A pull, which is split again when the routing has changed."""

    def __init__(self, client: PsClient, tables: Mapping[str, Ids], dense: bool, averaged: bool) -> None:
        self._client, self._tables, self._dense, self._averaged = client, tables, dense, averaged
        self.future: Future[Pulled] = Future()
        self._attempt = self._left = 0
        self._result = Pulled({}, {}, {})
        self._splits: dict[str, IdSplit] = {}
        self._routing = client.routing

    def send(self) -> None:
        client = self._client
        routing = self._routing = client.routing
        self._attempt += 1
        self._splits = {name: split_ids(routing, name, ids) for name, ids in self._tables.items()}
        self._result = Pulled({}, {}, {})
        if len(routing.servers) > 1 and self._dense:
            self._result.dense.update(empty_dense(routing))
        requests = []
        for index, ref in enumerate(routing.servers):
            names = tuple(name for name, split in self._splits.items() if split.count(index))
            parts = parts_of(routing, index) if self._dense else []
            if names or parts:
                body = PullRequest(routing.version, names, bool(parts), client.half, self._averaged)
                ids = [self._tables[name][self._splits[name].places(index)] for name in names]
                done = functools.partial(self._take, self._attempt, index, names, parts)
                reply = self._count_reply(names, ids, parts)
                requests.append(PeerRequest(ref, Call.PULL, body, ids, done, reply))
        self._left = len(requests)
        if requests:
            client.send_all(requests)
        else:
            self._finish()

    def _count_reply(self, names: tuple[str, ...], ids: list[Ids], parts: list[DensePart]) -> int:
        """Bytes of the arrays that answer; without those of tables of which no row has come yet."""
        sizes = self._client.row_bytes
        rows = sum(len(one) * sizes.get(name, 0) + 8 for name, one in zip(names, ids, strict=True))
        return rows + sum(4 * (part.stop - part.start) + 8 for part in parts)

    def _take(
        self, attempt: int, index: int, names: tuple[str, ...], parts: list[DensePart],
        frame: ReceivedFrame | None, failure: Failure | None, inbox: Inbox,
    ) -> None:  # fmt: skip
        if attempt != self._attempt:
            return
        if frame is None:
            assert failure is not None
            self._attempt += 1
            if failure.code == "routing":
                self._client.stall(self)
            else:
                self.fail(rebuild_failure(failure))
            return
        result, routing = self._result, self._routing
        result.steps[routing.servers[index]] = frame.read(PullReply).steps
        rows, dense = frame.arrays[: len(names)], frame.arrays[len(names) :]
        self._client.row_bytes.update((name, one.strides[0]) for name, one in zip(names, rows, strict=True))
        if len(routing.servers) == 1:
            inbox.detach()
            result.rows.update(zip(names, map(widen, rows), strict=True))
            result.dense.update({part.name: one for part, one in zip(parts, dense, strict=True)})
        else:
            for name, one in zip(names, rows, strict=True):
                if name not in result.rows:
                    result.rows[name] = np.empty((len(self._tables[name]), one.shape[1]), np.float32)
                result.rows[name][self._splits[name].places(index)] = one
            for part, one in zip(parts, dense, strict=True):
                result.dense[part.name][part.start : part.stop] = one
        self._left -= 1
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        for name in self._tables:
            self._result.rows.setdefault(name, np.empty((0, 0), np.float32))
        self._client.finish_pull(self, self._result)

    def fail(self, error: TruelineError) -> None:
        self._client.finish_pull(self, error)


class _Push:
    """A push, which is split again when the routing has changed: the servers that have it say so again."""

    def __init__(self, client: PsClient, gradients: Gradients) -> None:
        self._client, self._gradients = client, gradients
        self._attempt = self._left = 0

    def send(self) -> None:
        client, routing, given = self._client, self._client.routing, self._gradients
        self._attempt += 1
        tables = {
            name: (split_ids(routing, name, ids), ids, narrow(rows) if client.half else rows)
            for name, (ids, rows) in given.tables.items()
        }
        requests = []
        for index, ref in enumerate(routing.servers):
            arrays: list[Array] = []
            names = tuple(name for name, (split, _, _) in tables.items() if split.count(index))
            for name in names:
                split, ids, rows = tables[name]
                arrays += [ids[split.places(index)], rows[split.places(index)]]
            body = PushRequest(
                routing=routing.version, pulled=given.pulled.get(ref, -1), epoch=given.epoch,
                minibatch=given.minibatch, part=given.part, parts=given.parts, weight=given.weight, lrs=given.lrs,
                tables=names, attempt=given.attempt, scale=given.scale,
            )  # fmt: skip
            arrays += slice_dense(parts_of(routing, index), given.dense)
            requests.append(PeerRequest(ref, Call.PUSH, body, arrays, functools.partial(self._take, self._attempt)))
        self._left = len(requests)
        client.send_all(requests)

    def _take(self, attempt: int, frame: ReceivedFrame | None, failure: Failure | None, inbox: Inbox) -> None:
        if attempt != self._attempt:
            return
        if frame is not None:
            self._left -= 1
            if not self._left:
                self._client.finish_push(self._gradients.key, None)
            return
        assert failure is not None
        self._attempt += 1
        if failure.code == "routing":
            self._client.stall(self)
        else:
            self.fail(rebuild_failure(failure))

    def fail(self, error: TruelineError) -> None:
        self._client.finish_push(self._gradients.key, error)


class _Router:
    """Asks for the present routing while an operation needs it, in a thread of its own."""

    def __init__(self, client: PsClient, ask: Callable[[], Routing] | None) -> None:
        self._client, self._ask = client, ask
        self._lock = threading.Lock()
        self._stalled: list[_Pull | _Push] = []
        self._runs = False
        self._closed = threading.Event()

    def add(self, operation: _Pull | _Push) -> None:
        if self._ask is None:
            operation.fail(TrainError("the routing of the servers has changed", hint="make a new client"))
            return
        with self._lock:
            self._stalled.append(operation)
            begin, self._runs = not self._runs, True
        if begin:
            threading.Thread(target=self._run, args=(self._ask,), name="routing", daemon=True).start()

    def _run(self, ask: Callable[[], Routing]) -> None:
        while not self._closed.is_set():
            before = self._client.routing.version
            try:
                routing = ask()
            except (TruelineError, OSError):  # the master is away for a while
                self._closed.wait(PAUSE_S)
                continue
            if routing.version > before:
                self._client.routing = routing
            else:
                self._closed.wait(PAUSE_S)  # a cut is being made: the servers have it before the master says so
            with self._lock:
                operations, self._stalled = self._stalled, []
                if not operations:
                    self._runs = False
                    return
            for operation in operations:
                operation.send()

    def close(self) -> None:
        self._closed.set()

"""What a server holds and every message that changes it, live and when the log is read again: the same frames in the
same order give the same state."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from trueline.errors import StorageError, TrainError
from trueline.ps.messages import ModelSpec, Routing, describe_change
from trueline.ps.server import snapshot
from trueline.ps.split import widen
from trueline.ps.tables.held import Held, Push
from trueline.ps.wire import Array, Call, Configure, FrameError, Initialize, Moved, PushRequest, ReceivedFrame


class NotConfigured(TrainError):
    """The server does not know its part yet."""

    code = "unconfigured"


class OtherRouting(TrainError):
    """The caller's routing is not the server's; nothing was changed."""

    code = "routing"


class SpecChanged(TrainError):
    """A model that differs from what the server holds."""

    code = "spec"


class Holding:
    """`name`: the server's ref without its incarnation, by which a routing gives it its number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModelSpec | None = None
        self.routing: Routing | None = None
        self._held: Held | None = None
        self.is_moving = False
        """Whether it has taken rows that a coming routing gives it. Until a routing comes it may apply nothing: a push
        that it applied by the old one would lack what it does to these rows."""

    @property
    def held(self) -> Held:
        """Raises NotConfigured."""
        if self._held is None:
            raise NotConfigured(f"{self.name} is not configured yet", hint="try again in a moment")
        return self._held

    @property
    def is_configured(self) -> bool:
        return self._held is not None

    def check_ready(self) -> None:
        """Raises NotConfigured until the first worker has given the dense values."""
        if not self.held.initialized:
            raise NotConfigured(f"{self.name} has no dense values yet", hint="try again in a moment")

    def check_routing(self, version: int) -> None:
        if self.routing is None or version != self.routing.version:
            own = -1 if self.routing is None else self.routing.version
            raise OtherRouting(f"{self.name} has routing {own}, not {version}", hint="ask the master for the routing")

    def read_push(self, request: PushRequest, arrays: list[Array]) -> Push:
        """The push of a frame, of the same memory. Raises FrameError when arrays are missing."""
        tables = len(request.tables)
        if len(arrays) < 2 * tables:
            raise FrameError(f"a push of {tables} tables has {len(arrays)} arrays, expected ids and rows of each")
        return Push(
            epoch=request.epoch, minibatch=request.minibatch, part=request.part, parts=request.parts,
            weight=request.weight, lrs=request.lrs,
            tables=[
                (name, arrays[2 * at], widen(arrays[2 * at + 1])) for at, name in enumerate(request.tables)
            ],
            dense=list(arrays[2 * tables :]), attempt=request.attempt, scale=request.scale,
        )  # fmt: skip

    def check_configure(self, body: Configure) -> bool:
        """Whether it is news. Raises SpecChanged when the server holds another model."""
        if self._held is None or body.fresh:
            self._index_in(body.routing)
            return True
        if body.spec != self.spec:
            raise SpecChanged(
                f"{self.name} holds another model: {describe_change(self.spec, body.spec)}",
                hint="start a new job for the changed model, or restore the recipe",
            )
        return False

    def _index_in(self, routing: Routing) -> int:
        if self.name not in routing.servers:
            raise OtherRouting(f"{self.name} is none of the routing's servers: {', '.join(routing.servers)}")
        return routing.servers.index(self.name)

    def apply(self, frame: ReceivedFrame) -> None:
        """Carries out a checked frame."""
        if frame.kind is Call.PUSH:
            self.held.push(self.read_push(frame.read(PushRequest), frame.arrays))
        elif frame.kind is Call.INITIALIZE:
            names = frame.read(Initialize).names
            self.held.initialize({name: one.copy() for name, one in zip(names, frame.arrays, strict=True)})
        elif frame.kind is Call.CONFIGURE:
            body = frame.read(Configure)
            self.configure(body.spec, body.routing)
        elif frame.kind is Call.TAKE:
            self.held.take(msgspec.msgpack.decode(frame.read(Moved).header), frame.arrays)
            self.is_moving = True
        elif frame.kind is Call.EXPORT:  # another server is getting its rows: they may not change here meanwhile
            self.is_moving = True
        elif frame.kind is Call.ROUTE:
            self.routing, self.is_moving = frame.read(Routing), False
            if self.name in self.routing.servers:  # else it has no part any more, and refuses every other routing
                self.held.reroute(self.routing)
        else:
            raise FrameError(f"a log has a frame of kind {frame.kind.name}, which changes nothing")

    def configure(self, spec: ModelSpec, routing: Routing) -> None:
        self.spec, self.routing, self.is_moving = spec, routing, False
        self._held = Held(spec, routing, self._index_in(routing))

    def restore(self, body: Configure) -> None:
        """Takes what the routing gives this server from the files of a checkpoint. Raises StorageError, also when one
        of them is missing."""
        self.configure(body.spec, body.routing)
        headers = []
        for path in body.restore:
            header, arrays = snapshot.read(Path(path))
            self.held.take(header, arrays)
            headers.append(header)
        expect_all_parts(headers, body.restore)

    def dump(self) -> tuple[snapshot.Header, list[Array]]:
        return self.held.dump()

    def load(self, header: snapshot.Header, arrays: list[Array]) -> None:
        self._held = Held.load(header, arrays)
        self.spec, self.routing = self._held.spec, self._held.routing


def expect_all_parts(headers: Sequence[snapshot.Header], paths: Sequence[str]) -> None:
    """Raises StorageError if these are not the files of all servers of a cut."""
    if not headers:
        return
    servers = msgspec.msgpack.decode(headers[0]["routing"], type=Routing).servers
    there = {header["index"] for header in headers}
    lacking = [ref for index, ref in enumerate(servers) if index not in there]
    if lacking:
        raise StorageError(
            f"{Path(paths[0]).parent} has no part of {', '.join(lacking)}: it is of {len(servers)} servers",
            hint="restore it from a copy, or resume from an earlier checkpoint",
        )

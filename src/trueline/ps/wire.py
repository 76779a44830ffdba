"""Frames between the processes of a parameter-server job, over a Unix socket or TCP. No torch.

    head    magic, kind, number of the request, length of header and of the arrays
    header  msgpack: dtype and shape of each array, then the message's own fields; padded to 8 bytes
    arrays  as they lie in memory, each padded to 8 bytes

Arrays are sent by sendmsg(2) from where they lie and received into a buffer that the next frame uses again, so what is
kept of a frame has to be copied, or its buffer taken (`Inbox.detach`). On one host a large frame lies in memory that
both sides share. A reply has the number of its request; replies may overtake each other. A frame on a disk has the same
bytes.
"""

import itertools
import socket
import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from trueline.errors import TrainError, TruelineError, find_error_class
from trueline.ps.messages import ModelSpec, Routing, Runs
from trueline.ps.shared_memory import MAGIC as _PLACE
from trueline.ps.shared_memory import CallerMemory, ListenerMemory, ReplyRoom

Array = npt.NDArray[Any]
Buffer = memoryview | bytes
_T = TypeVar("_T")

HEAD = struct.Struct("<4sB3xIIQ")  # magic, kind, number, bytes of the header, bytes of the arrays
MAX_HEADER = 64 << 20
MAX_ARRAYS = 64 << 30
"""Only who has the secret can have a buffer made."""
_MAGIC = b"TLP\1"
_ZEROS = bytes(8)
_IOV_MAX = 512  # half of what the kernel takes in one call
_KEPT_BUFFER = 64 << 20


class Call(IntEnum):
    """What a frame is: a reply, or a request and the message that it carries."""

    OK = 0
    ERROR = 1  # Failure
    CONFIGURE = 2  # Configure
    INITIALIZE = 3  # Initialize; arrays: the dense values
    PULL = 4  # PullRequest; arrays: ids of each table. Reply: PullReply; arrays: rows of each table, dense parts
    PUSH = 5  # PushRequest; arrays: ids and rows of each table, then the dense parts of this server
    STATS = 6  # reply: ServerReport
    BEGIN_CUT = 7  # BeginCut; the reply comes when the server has applied all that the cut names
    END_CUT = 8  # EndCut
    SAVE = 9  # SaveRequest; the reply comes at once, the file has the state of this moment
    SAVED = 10  # SaveRequest; the reply comes when the file is on the disk
    EXPORT = 11  # ExportRequest. Reply: Moved, arrays
    TAKE = 12  # Moved, arrays
    ROUTE = 13  # Routing
    STOP = 14
    SQUARES = 15  # SquaresRequest; reply: Squares


class Configure(msgspec.Struct, frozen=True, array_like=True):
    spec: ModelSpec
    routing: Routing
    restore: tuple[str, ...] = ()
    """Files that SAVE wrote, of all servers of a checkpoint: a server takes what the routing gives it."""
    fresh: bool = False
    """It is about to get rows: what it holds, of an earlier time or of a move that came to nothing, is forgotten."""


class Initialize(msgspec.Struct, frozen=True, array_like=True):
    names: tuple[str, ...]  # `name[start:stop]` of each array


class PullRequest(msgspec.Struct, frozen=True, array_like=True):
    routing: int
    tables: tuple[str, ...]
    dense: bool
    half: bool = False  # rows come as float16
    averaged: bool = False  # the moving averages of the rows


class PullReply(msgspec.Struct, frozen=True, array_like=True):
    steps: int


class PushRequest(msgspec.Struct, frozen=True, array_like=True):
    routing: int
    pulled: int  # the server's steps when the parameters were pulled
    epoch: int
    minibatch: int
    part: int
    parts: int
    weight: float
    lrs: tuple[float, ...]
    tables: tuple[str, ...]
    attempt: int = 0  # above 0: `minibatch` is a step, of which each attempt has parts of its own
    scale: float = (
        0.0  # above 0: the last part of an attempt, which has no rows: what the sum of the others is multiplied by
    )


class SquaresRequest(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    minibatch: int


class Squares(msgspec.Struct, frozen=True, array_like=True):
    value: float  # the sum of the squares of this server's gradients of rows in a step


class BeginCut(msgspec.Struct, frozen=True, array_like=True):
    id: int
    keys: dict[int, Runs]


class EndCut(msgspec.Struct, frozen=True, array_like=True):
    id: int


class SaveRequest(msgspec.Struct, frozen=True, array_like=True):
    path: str


class ExportRequest(msgspec.Struct, frozen=True, array_like=True):
    buckets: tuple[int, ...]
    dense: tuple[str, ...] = ()  # `name[start:stop]`


class Moved(msgspec.Struct, frozen=True, array_like=True):
    header: msgspec.Raw  # what `Held` says of the arrays


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Codes: `routing` another version, ask for it; `unconfigured` try again later; `gradient`; those of errors."""

    code: str
    message: str
    hint: str = ""


class FrameError(ConnectionError):
    """What came is no frame, or its sender lacks the secret: the connection cannot be used any more."""


class PushRefused(TrainError):
    """A server refuses a gradient, without having changed anything."""

    code = "gradient"


def rebuild_failure(failure: Failure) -> TruelineError:
    return find_error_class(failure.code, TrainError)(failure.message, hint=failure.hint)


class ReceivedFrame(NamedTuple):
    """`arrays` are views of the buffer that the frame was received into; `data` is the whole frame."""

    kind: Call
    number: int
    body: msgspec.Raw
    arrays: list[Array]
    data: memoryview
    room: ReplyRoom | None = None  # in shared memory, for the reply

    def read(self, of: type[_T]) -> _T:
        """Raises FrameError when the message is of another type."""
        try:
            return msgspec.msgpack.decode(self.body, type=of)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a frame of kind {self.kind.name} has no {of.__name__}: {error}") from error


_Header = tuple[list[tuple[str, tuple[int, ...]]], msgspec.Raw]
_header_decoder = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder()
_dtypes = {np.dtype(code).str: np.dtype(code) for code in ("f2", "f4", "f8", "i4", "i8", "u1", "u2", "u4", "u8", "b1")}


def encode(kind: Call, number: int, body: object = None, arrays: Sequence[Array] = ()) -> list[Buffer]:
    """The frame as pieces to send in order. Arrays that are contiguous are not copied. Raises ValueError for others'
    dtypes."""
    specs: list[tuple[str, tuple[int, ...]]] = []
    pieces: list[Buffer] = []
    size = 0
    for one in arrays:
        if one.dtype.str not in _dtypes:
            raise ValueError(f"a frame carries no {one.dtype}, expected one of {', '.join(sorted(_dtypes))}")
        specs.append((one.dtype.str, one.shape))
        length = one.nbytes
        if length:
            flat = one if one.flags.c_contiguous else np.ascontiguousarray(one)
            pieces.append(flat.reshape(-1).view(np.uint8).data)
            size += length
            if length & 7:
                pieces.append(_ZEROS[length & 7 :])
                size += 8 - (length & 7)
    header = _encoder.encode((specs, body))
    padding = -(HEAD.size + len(header)) & 7
    head = HEAD.pack(_MAGIC, kind, number, len(header), size)
    return [head + header + _ZEROS[:padding], *pieces]


def measure(head: Buffer) -> int:
    """Bytes of the whole frame that begins with `head`. Raises FrameError."""
    magic, kind, _, header, size = HEAD.unpack_from(head)
    if magic != _MAGIC or kind >= len(Call) or header > MAX_HEADER or size > MAX_ARRAYS or size & 7:
        raise FrameError(f"{bytes(head[: HEAD.size]).hex()} is not the head of a frame")
    start: int = HEAD.size + header
    return start + (-start & 7) + int(size)


def decode(data: memoryview) -> ReceivedFrame:
    """The frame that `data` is, with views of it as arrays. Raises FrameError."""
    if len(data) < HEAD.size or measure(data) != len(data):
        raise FrameError(f"a frame of {len(data)} bytes is torn")
    _, kind, number, length, _ = HEAD.unpack_from(data)
    try:
        specs, body = _header_decoder.decode(data[HEAD.size : HEAD.size + length])
        at = HEAD.size + length
        at += -at & 7
        arrays = []
        for code, shape in specs:
            dtype, count = _dtypes[code], 1
            for one in shape:
                count *= one
            if min(shape, default=0) < 0 or count * dtype.itemsize > len(data) - at:
                raise FrameError(f"an array of {shape} is longer than its frame")
            array: Array = np.frombuffer(data, dtype, count, at) if count else np.empty(0, dtype)
            arrays.append(array.reshape(shape) if len(shape) != 1 else array)
            at += (count * dtype.itemsize + 7) & ~7
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise FrameError(f"a frame of kind {kind} has a header that cannot be read: {error}") from error
    if at != len(data):
        raise FrameError(f"the arrays of a frame have {len(data) - at} bytes more than its header says")
    return ReceivedFrame(Call(kind), number, body, arrays, data)


class Inbox:
    """Receives frames, one at a time, into a buffer that grows and is used again, or finds them in shared memory."""

    def __init__(self, shared: CallerMemory | ListenerMemory | None = None) -> None:
        self.shared = shared
        self._take_buffer(1 << 16)

    def _take_buffer(self, size: int) -> None:
        self._view = np.empty(size, np.uint8).data
        self._at, self._end, self._in_head = 0, HEAD.size, True
        self._lent = False

    def receive(self, connection: socket.socket) -> ReceivedFrame | None:
        """The next frame; None when the connection has no more of it yet. Its arrays are valid until the next call.

        Raises ConnectionError at the connection's end, and for what is no frame.
        """
        while True:
            try:
                count = connection.recv_into(self._view[self._at : self._end])
            except BlockingIOError:
                return None
            if not count:
                raise ConnectionResetError("the connection was closed")
            self._at += count
            if self._at < self._end:
                continue
            if not self._in_head:
                frame = decode(self._view[: self._end])
                self._at, self._end, self._in_head = 0, HEAD.size, True
                self._lent = True
                return frame
            if self.shared is not None and self._view[: len(_PLACE)] == _PLACE:
                self._at, self._lent = 0, False
                return self._find(self.shared)
            end = measure(self._view)
            if end > len(self._view) or len(self._view) > max(end, _KEPT_BUFFER):
                head = bytes(self._view[: HEAD.size])
                self._take_buffer(end + (end >> 3))
                self._view[: HEAD.size] = head
                self._at = HEAD.size
            self._end, self._in_head = end, False

    def _find(self, shared: CallerMemory | ListenerMemory) -> ReceivedFrame:
        try:
            found = shared.find(self._view[: HEAD.size])
        except ValueError as error:
            raise FrameError(str(error)) from error
        return decode(found.data)._replace(room=found.room)

    def detach(self) -> None:
        """Leaves the buffer to who holds the last frame; the next one gets another."""
        if self._lent:
            self._take_buffer(len(self._view))


class Outbox:
    """Pieces that wait to be sent, in order."""

    def __init__(self) -> None:
        self._pieces: deque[Buffer] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, pieces: Sequence[Buffer]) -> None:
        self._pieces.extend(pieces)

    def send(self, connection: socket.socket) -> bool:
        """Sends what the connection takes; whether that was all. Raises OSError."""
        pieces = self._pieces
        while pieces:
            try:
                sent = connection.sendmsg(list(itertools.islice(pieces, _IOV_MAX)))
            except BlockingIOError:
                return False
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.popleft())
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]
        return True

    def copy_rest(self) -> None:
        """Copies what is left, so that the arrays may change from now on."""
        self._pieces = deque(bytes(piece) for piece in self._pieces)

    def clear(self) -> None:
        self._pieces.clear()

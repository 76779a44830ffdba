"""Transfers the state of a job from one worker to another: peer to peer, never through the disk, without pickle.

    broadcast   while a group forms: small states, and whenever no member can continue anyway
    stream      beside the training: the source offers a snapshot, a thread of the joiner fetches it in pieces

A streamed state is of the step at which the group formed (`recovery.py`). No allocation, copy or system call holds the
interpreter's lock for a whole state: heartbeats and other threads run meanwhile, however large it is.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trueline.checkpoint import tree
from trueline.checkpoint.snapshot import Snapshot, as_bytes
from trueline.errors import CheckpointError
from trueline.parallel import handshake
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.handshake import Hello, PeerListener, Purpose
from trueline.parallel.peer_memory import PeerMemory

CHUNK = 4 << 20
STREAM_BYTES = 16 << 20
"""A larger state is streamed, so that the other members need not wait for it."""
PATIENCE_S = 30.0  # how long a peer may be silent in the middle of a transfer
MOST_HEADER = 64 << 20
"""Bytes of the structure of a state: names, numbers, shapes."""
_LENGTH, _TIMEVAL = struct.Struct("!Q"), struct.Struct("@ll")
_SMALL, _PIECE = 1 << 20, 64 << 20
"""Of a broadcast: smaller tensors travel together, larger ones in pieces."""


class Room:
    """Memory into which a state is received: tensors of a model by name, and spare ones by shape, else new memory.

    The first touch of new memory takes longer than its copy, so `touch` does it while the others still take a step.
    """

    def __init__(self, model: Mapping[str, torch.Tensor] | None = None) -> None:
        self._model = dict(model or {})
        self._spare: dict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = {}
        self._wanted = True

    def touch(self, like: Sequence[torch.Tensor]) -> None:
        """Begins to make spare tensors, in a thread that ends with `allocate`."""
        threading.Thread(target=self._touch, args=(like,), name="touch", daemon=True).start()

    def _touch(self, like: Sequence[torch.Tensor]) -> None:
        for tensor in like:
            if not self._wanted:
                return
            spare = torch.empty(tensor.shape, dtype=tensor.dtype).zero_()
            self._spare.setdefault((tensor.dtype, tensor.shape), []).append(spare)

    def allocate(self, skeleton: tree.Skeleton, shapes: list[list[Any]]) -> list[torch.Tensor]:
        """Tensors of these dtypes and shapes; those of the model are its own under its own names."""
        self._wanted = False
        sections = dict(skeleton["d"]) if isinstance(skeleton, dict) and "d" in skeleton else {}
        names = {node["t"]: name for name, node in sections.get("model", {}).get("d", ()) if "t" in (node or ())}
        tensors = []
        for index, (named, shape) in enumerate(shapes):
            dtype, own = getattr(torch, named), self._model.get(names.get(index, ""))
            spare = self._spare.get((dtype, torch.Size(shape)))
            if (
                own is not None
                and own.is_cpu
                and own.is_contiguous()
                and (own.dtype, list(own.shape)) == (dtype, shape)
            ):
                tensors.append(own.detach())
            else:
                tensors.append(spare.pop() if spare else torch.empty(shape, dtype=dtype))
        return tensors


def broadcast(
    group: GlooGroup, state: dict[str, Any] | None, *, source: int, room: Room | None = None
) -> dict[str, Any] | None:
    """Broadcasts the `state` of rank `source`; the others pass None. Raises RuntimeError when a peer fails.

    On the machine of the source, members read it where it lies. `room`: where this member receives the state; without
    one it does not need it, and gets None.
    """
    header, tensors = b"", list[torch.Tensor]()
    if state is not None:
        skeleton, tensors = tree.encode(state)
        tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        header = _encode_header(skeleton, tensors, PeerMemory.of(tensors))
    length = torch.tensor([len(header)], dtype=torch.int64)
    group.wait(dist.broadcast(length, source, async_op=True))
    text = torch.frombuffer(bytearray(header or bytes(int(length.item()))), dtype=torch.uint8)
    group.wait(dist.broadcast(text, source, async_op=True))
    skeleton, shapes, memory = json.loads(bytes(text.numpy()))
    missed = False
    if state is None:
        missed = room is not None
        if room is not None:
            tensors = room.allocate(skeleton, shapes)
            missed = not PeerMemory(*memory).reads(tensors)
    if _count(group, missed):
        tensors = tensors or Room().allocate(skeleton, shapes)
        _send_all(group, tensors, source=source, own=state is not None)
    if room is None:
        return state
    received: dict[str, Any] = tree.decode(skeleton, tensors)
    return received


def _count(group: GlooGroup, missed: bool) -> int:
    """How many members have missed something. The second sum needs a source that was there after the last read: a
    source that leaves the group before changes what they read."""
    words = torch.tensor([float(missed)])
    group.wait(group.sum_on_host(words))
    group.wait(group.sum_on_host(torch.zeros(1)))
    return int(words.item())


def _send_all(group: GlooGroup, tensors: list[torch.Tensor], *, source: int, own: bool) -> None:
    """Broadcasts tensors of equal shapes in all members, in place; `own`: this member is the source."""
    flats = [as_bytes(tensor) for tensor in tensors]
    small = [flat for flat in flats if len(flat) < _SMALL]
    together = torch.cat([torch.empty(0, dtype=torch.uint8), *small])
    for flat in (together, *(flat for flat in flats if len(flat) >= _SMALL)):
        for start in range(0, len(flat), _PIECE):
            group.wait(dist.broadcast(flat[start : start + _PIECE], source, async_op=True))
    if not own:
        for flat, part in zip(small, torch.split(together, [len(flat) for flat in small]), strict=True):
            flat.copy_(part)


class Offer:
    """Serves a snapshot to workers of this job (`handshake.py`) that name its generation."""

    def __init__(self) -> None:
        self._listener = PeerListener(self._accept, name="state")
        self.address = self._listener.address
        self._offered: tuple[int, Snapshot] | None = None
        self._change = threading.Condition()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were sent, and bytes to send; zeros without an offer."""
        offered = self._offered
        return (
            (0, 0) if offered is None or offered[1].moved == offered[1].total else (offered[1].moved, offered[1].total)
        )

    def publish(self, generation: int, snapshot: Snapshot) -> None:
        """Offers `snapshot` to as many members of `generation` as it has readers."""
        with self._change:
            self._offered = generation, snapshot
            self._change.notify_all()

    def withdraw(self) -> None:
        if self._offered is None:  # the usual case
            return
        with self._change:
            _, snapshot = self._offered
            self._offered = None
        snapshot.close()

    def close(self) -> None:
        self.withdraw()
        self._listener.close()

    def _accept(self, hello: Hello, connection: socket.socket) -> None:
        threading.Thread(target=self._answer, args=(hello, connection), name="state_answer", daemon=True).start()

    def _answer(self, hello: Hello, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, CheckpointError):  # the joiner is gone, or the snapshot
            if hello.purpose != Purpose.STATE:
                return
            with self._change:
                self._change.wait_for(lambda: self._offered and self._offered[0] >= hello.generation, PATIENCE_S)
                offered = self._offered
            if offered is None or offered[0] != hello.generation:
                return
            snapshot = offered[1]
            _limit(connection, socket.SO_SNDTIMEO, PATIENCE_S)
            header = _encode_header(snapshot.skeleton, snapshot.layout)
            connection.sendall(_LENGTH.pack(len(header)) + header)
            for index in range(len(snapshot.layout)):
                for piece in snapshot.pieces(index):
                    connection.sendall(piece)


class Fetch:
    """Fetches, in a thread, the state that the member at `address` offers to `generation`.

    What fits is received in the memory of `room`, also if the transfer fails: for a worker that has no state to lose.
    """

    def __init__(self, address: str, generation: int, room: Room | None = None) -> None:
        self._address, self._generation, self._room = address, generation, room or Room()
        self.began = time.monotonic()
        self.state: dict[str, Any] | None = None
        self.trouble = ""
        self.moved = self.total = 0
        """Bytes that have arrived, and all; zeros until the source has said how many."""
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """True when `state` or `trouble` is set."""
        return not self._thread.is_alive()

    def join(self, given_up: Callable[[], bool]) -> None:
        """Returns when the transfer is over, or when `given_up` returns True."""
        while self._thread.is_alive() and not given_up():
            self._thread.join(0.02)

    def _run(self) -> None:
        hello = Hello(Purpose.STATE, self._generation)
        try:
            with handshake.connect(self._address, hello, handshake.PROOF_S) as connection:
                _limit(connection, socket.SO_RCVTIMEO, 2 * PATIENCE_S)
                header = bytearray(_length(connection, most=MOST_HEADER))
                self._receive(connection, memoryview(header))
                skeleton, shapes = json.loads(header)
                tensors = self._room.allocate(skeleton, shapes)
                self.moved, self.total = 0, sum(tensor.nbytes for tensor in tensors)
                for tensor in tensors:
                    self._receive(connection, as_bytes(tensor).numpy().data)
                self.state = tree.decode(skeleton, tensors)
        except (OSError, ValueError, CheckpointError) as error:
            self.trouble = f"the state was not received from {self._address}: {error}"

    def _receive(self, connection: socket.socket, room: memoryview) -> None:
        at = 0
        while at < len(room):
            got = connection.recv_into(room[at:], min(CHUNK, len(room) - at), socket.MSG_WAITALL)
            if not got:
                raise OSError("the peer closed the connection")
            at += got
            self.moved += got


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    """Lets a call on `connection` block in the kernel for so long: one call for a whole chunk (socket(7))."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def _length(connection: socket.socket, *, most: int) -> int:
    data = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(data) < _LENGTH.size:
        raise OSError("the peer closed the connection")
    (length,) = _LENGTH.unpack(data)
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected at most {most}")
    return int(length)


def _encode_header(skeleton: tree.Skeleton, tensors: list[torch.Tensor], *more: object) -> bytes:
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    return json.dumps([skeleton, shapes, *more]).encode()

"""Transfers the state of a job from one worker to another: peer to peer, never through the disk, without pickle.

    broadcast   while a group forms: small states, and whenever no member can continue anyway
    stream      beside the training: the source offers a copy, a thread of the joiner fetches it in chunks

A streamed state is of the step at which the group formed (`recovery.py`).
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trueline.checkpoint import tree
from trueline.parallel import handshake
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.handshake import Hello, PeerListener, Purpose

CHUNK = 4 << 20
STREAM_BYTES = 16 << 20
"""A larger state is streamed, so that the other members need not wait for it."""
PATIENCE_S = 30.0  # how long a peer may be silent in the middle of a transfer
_LENGTH = struct.Struct("!Q")


def broadcast(group: GlooGroup, state: dict[str, Any] | None, *, source: int) -> dict[str, Any]:
    """Broadcasts the `state` of rank `source`; the others pass None. Raises RuntimeError when a peer fails."""
    header, tensors = _pack(state) if state is not None else (b"", [])
    length = torch.tensor([len(header)], dtype=torch.int64)
    group.wait(dist.broadcast(length, source, async_op=True))
    flat = torch.frombuffer(bytearray(header), dtype=torch.uint8) if state is not None else None
    received = _broadcast_flat(group, flat, source, int(length.item()))
    skeleton, shapes = json.loads(bytes(received.numpy()))
    flat = torch.cat([_as_bytes(tensor) for tensor in tensors]) if tensors else None
    received = _broadcast_flat(group, flat, source, sum(_nbytes(dtype, shape) for dtype, shape in shapes))
    return _unpack(skeleton, shapes, received) if state is None else state


def _broadcast_flat(group: GlooGroup, flat: torch.Tensor | None, source: int, size: int) -> torch.Tensor:
    buffer = torch.empty(size, dtype=torch.uint8) if flat is None else flat
    piece = 64 << 20
    for start in range(0, size, piece):
        group.wait(dist.broadcast(buffer[start : start + piece], source, async_op=True))
    return buffer


class Offer:
    """Serves a copied state to workers of this job (`handshake.py`) that name the state's generation."""

    def __init__(self) -> None:
        self._listener = PeerListener(self._accept, name="state")
        self.address = self._listener.address
        self._offered: tuple[int, dict[str, Any]] | None = None
        self._change = threading.Condition()

    def publish(self, generation: int, state: dict[str, Any]) -> None:
        """Offers `state`, which must not change, to the members of `generation`."""
        with self._change:
            self._offered = generation, state
            self._change.notify_all()

    def withdraw(self) -> None:
        if self._offered is None:  # the usual case
            return
        with self._change:
            self._offered = None

    def close(self) -> None:
        self.withdraw()
        self._listener.close()

    def _accept(self, hello: Hello, connection: socket.socket) -> None:
        threading.Thread(target=self._answer, args=(hello, connection), name="state", daemon=True).start()

    def _answer(self, hello: Hello, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the joiner is gone
            if hello.purpose != Purpose.STATE:
                return
            connection.settimeout(PATIENCE_S)
            with self._change:
                self._change.wait_for(lambda: self._offered and self._offered[0] >= hello.generation, PATIENCE_S)
                offered = self._offered
            if offered is None or offered[0] != hello.generation:
                return
            header, tensors = _pack(offered[1])
            connection.sendall(_LENGTH.pack(len(header)) + header)
            for tensor in tensors:
                flat = _as_bytes(tensor).numpy()
                for start in range(0, len(flat), CHUNK):
                    connection.sendall(flat[start : start + CHUNK].data)


class Fetch:
    """Fetches, in a thread, the state that the member at `address` offers to `generation`."""

    def __init__(self, address: str, generation: int) -> None:
        self._address, self._generation = address, generation
        self.state: dict[str, Any] | None = None
        self.trouble = ""
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
                connection.settimeout(2 * PATIENCE_S)
                skeleton, shapes = json.loads(_receive(connection, _length(connection, most=1 << 30)))
                size = sum(_nbytes(dtype, shape) for dtype, shape in shapes)
                flat = torch.from_numpy(np.frombuffer(_receive(connection, size), np.uint8))
                self.state = _unpack(skeleton, shapes, flat)
        except (OSError, ValueError) as error:
            self.trouble = f"the state was not received from {self._address}: {error}"


def _length(connection: socket.socket, *, most: int) -> int:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected at most {most}")
    return int(length)


def _receive(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        got = connection.recv_into(view[at:], min(CHUNK, size - at))
        if not got:
            raise OSError("the peer closed the connection")
        at += got
    return buffer


def _pack(state: dict[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    skeleton, tensors = tree.encode(state)
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    return json.dumps([skeleton, shapes]).encode(), tensors


def _unpack(skeleton: Any, shapes: list[list[Any]], flat: torch.Tensor) -> dict[str, Any]:
    tensors, at = [], 0
    for dtype, shape in shapes:
        size = _nbytes(dtype, shape)
        piece = flat[at : at + size].clone()  # aligned, and without the large buffer
        tensors.append(piece.view(getattr(torch, dtype)).reshape(shape))
        at += size
    state: dict[str, Any] = tree.decode(skeleton, tensors)
    return state


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _nbytes(dtype: str, shape: list[int]) -> int:
    return int(getattr(torch, dtype).itemsize * np.prod(shape, dtype=np.int64))

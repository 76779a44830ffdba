"""The rendezvous store of a generation: keys and values on rank 0, for processes that have the job's secret.

torch's TCPStore authenticates no client, and lists its keys to all of them. This `Store` has the same interface, over
connections of `handshake.py`. gloo, NCCL and a user's backend reach it through torch's C++, as any other.
"""

import collections
import contextlib
import socket
import struct
import threading
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trueline.parallel import handshake
from trueline.parallel.handshake import Hello, Opened, PeerListener, Purpose

_MOST = 64 << 20
"""Bytes of a request or an answer."""
_SLACK_S = 5.0  # for an answer to arrive, beyond the time that the request may wait
_LENGTH = struct.Struct("!I")
_kept: collections.deque[Store] = collections.deque(maxlen=128)
_Value = bytes | bool | int | list[bytes] | list[str] | None


_AnyStore = TypeVar("_AnyStore", bound=Store)


def keep_alive(store: _AnyStore) -> _AnyStore:
    """Keeps the Python part of `store`, as torch's C++ does not: without it, a late call is one of a pure virtual."""
    _kept.append(store)
    return store


class StoreServer:
    """Serves a store for each generation in which this process is rank 0."""

    def __init__(self) -> None:
        self._generation, self._table = -1, _Table()
        self._listener = PeerListener(self._accept, name="store")
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _accept(self, hello: Hello, connection: socket.socket) -> None:
        if hello.purpose != Purpose.STORE or hello.generation < self._generation:
            connection.close()  # a group of that generation will not form any more
            return
        if hello.generation > self._generation:
            self._generation, self._table = hello.generation, _Table()
        threading.Thread(target=self._table.serve, args=(connection,), name="store", daemon=True).start()


class _Table:
    """The keys and values of one generation."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._change = threading.Condition()

    def serve(self, connection: socket.socket) -> None:
        """Answers the requests of one member until it closes the connection."""
        with connection, contextlib.suppress(OSError, ValueError):  # the member is gone
            while True:
                operation, *arguments = msgspec.msgpack.decode(_receive(connection))
                with self._change:
                    answer = self._answer(operation, arguments)
                _send(connection, answer)

    def _answer(self, operation: str, arguments: list[object]) -> _Value:
        values = self._values
        match operation, *arguments:
            case "set", str(key), bytes(value):
                values[key] = value
            case "add", str(key), int(amount):
                values[key] = b"%d" % (int(values.get(key, b"0")) + amount)
                self._change.notify_all()
                return int(values[key])
            case "compare", str(key), bytes(expected), bytes(desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                self._change.notify_all()
                return values.get(key, expected)
            case "delete", str(key):
                return values.pop(key, None) is not None
            case ("keys",):
                return list(values)
            case "wait", list(keys), float(timeout_s):
                return self._change.wait_for(lambda: values.keys() >= set(keys), timeout_s)
            case "get", list(keys), float(timeout_s):
                there = self._change.wait_for(lambda: values.keys() >= set(keys), timeout_s)
                return [values[key] for key in keys] if there else None
            case _:
                raise ValueError(f"an unknown request: {operation}")
        self._change.notify_all()
        return None


class PeerStore(Store):  # its methods are Store's, which torch's C++ calls by these names
    """The store of `generation`, whose rank 0 has its `StoreServer` at `address`. For use by any thread.

    Raises DistStoreError when rank 0 is gone, or a key does not appear in time.
    """

    def __init__(
        self, address: str, generation: int, rank: int, timeout: timedelta, opened: Opened = lambda _: None
    ) -> None:
        """`opened`: is given each connection."""
        super().__init__()
        self._opened = opened
        self._address, self._hello = address, Hello(Purpose.STORE, generation, rank)
        self._timeout_s = timeout.total_seconds()
        self._idle: collections.deque[socket.socket] = collections.deque()
        """Connections without a pending request."""
        keep_alive(self)

    def open(self) -> None:
        """Connects to rank 0, so that a dead one is found before torch's C++ is called."""
        self._idle.append(self._connect())

    def release(self) -> None:
        """Closes the connections that no call uses; a later call connects again."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took it
                self._idle.pop().close()

    def _connect(self) -> socket.socket:
        try:
            connection = handshake.connect(self._address, self._hello, self._timeout_s)
            self._opened(connection)
            return connection
        except OSError as error:
            raise dist.DistStoreError(f"the rendezvous store at {self._address} is gone: {error}") from error

    def _ask(self, *request: object, wait_s: float = 0.0) -> _Value:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.settimeout(wait_s + _SLACK_S)
            _send(connection, request)
            answer: _Value = msgspec.msgpack.decode(_receive(connection))
        except (OSError, ValueError) as error:
            connection.close()
            raise dist.DistStoreError(f"the rendezvous store at {self._address} is gone: {error}") from error
        self._idle.append(connection)
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        found = self._ask("get", [key], self._timeout_s, wait_s=self._timeout_s)
        if not isinstance(found, list):
            raise self._late([key], self._timeout_s)
        return bytes(found[0])  # type: ignore[arg-type]  # values are bytes

    def _late(self, keys: list[str], wait_s: float) -> Exception:
        return dist.DistStoreError(f"wait timeout: the rendezvous store at {self._address} got no {keys} in {wait_s} s")

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))  # type: ignore[arg-type]  # the answer is an int

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        pair = [value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired)]
        return bytes(self._ask("compare", key, *pair))  # type: ignore[arg-type]  # the answer is bytes

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def list_keys(self) -> list[str]:
        return list(self._ask("keys"))  # type: ignore[arg-type]  # the answer is a list of strings

    def num_keys(self) -> int:
        return len(self.list_keys())

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("wait", keys, 0.0))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._ask("wait", keys, wait_s, wait_s=wait_s):
            raise self._late(keys, wait_s)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> "PeerStore":
        return self  # each call has a connection of its own

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # torch's C++ calls these by other names


def _send(connection: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(read_all(connection, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes, expected at most {_MOST}")
    return read_all(connection, length)


def read_all(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes. Raises OSError when the peer closes the connection before."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), 1 << 20))
        if not more:
            raise OSError("the peer closed the connection")
        data += more
    return bytes(data)

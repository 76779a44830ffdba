"""Gives gloo the connections of `mesh.py`: no other process can connect to it, however early it tries.

gloo takes any connection that sends a member's number, 8 bytes, and 48 bytes of garbage behind them end the process
(gloo/transport/tcp/pair.cc: an unknown opcode throws in its event loop). Its API accepts no ready-made sockets. So

1. a filter (SO_ATTACH_FILTER, socket(7)) on gloo's listener drops each packet that is not from one of our own sockets;
2. gloo gets an address for each peer that is above its own, and so waits for a connection instead of making one;
3. this process connects to gloo itself, once for each peer, from the sockets that the filter admits;
4. each socket that gloo accepted is replaced by the proven connection (dup2), also in gloo's epoll set.

Between the listener's creation and the filter a stranger may be faster. Then another device is made, before the first
one has read anything. `tests/parallel/test_gloo_sockets.py` fails if torch's gloo changes in this.
"""

import contextlib
import ctypes
import functools
import os
import platform
import re
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from trueline.errors import TrainError
from trueline.parallel.store import keep_alive

_HOST = "127.0.0.1"
_SO_ATTACH_FILTER = 26
_LOAD_SOURCE_PORT, _LOAD_SOURCE_HOST = (0x28, 0, 0, 0), (0x20, 0, 0, 0xFFF00000 + 12)
"""Classic BPF: a halfword of the TCP header; a word of the IP header (SKF_NET_OFF)."""
_DROP, _ADMIT = (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)
_TRIES = 50
_ACCEPT_S = 10.0  # for gloo to accept a connection that exists
_LOOK_S = 100e-6
_ABOVE = b"\x7f\xff\xff\xff"
"""127.255.255.255: above every loopback address that gloo listens on. No packet is sent to it."""
_CTL_ADD, _CTL_DEL = 1, 2
_REGISTERED = re.compile(r"tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+) .*ino:\s*([0-9a-f]+)")
_libc = ctypes.CDLL(None, use_errno=True)
_creating = threading.Lock()
"""Held while a device is created, whose descriptors are those that are new afterwards."""


class _EpollEvent(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class _Retry(Exception):
    """Another process connected before there was a filter, or the device was not found: another device may work."""


def form(links: dict[int, socket.socket], rank: int, size: int, patience: timedelta) -> ProcessGroupGloo:
    """The group of this member and its peers, over `links` by their rank, which it takes over.

    Raises RuntimeError when it is not formed, TrainError when torch's gloo cannot be given connections.
    """
    why = ""
    try:
        for _ in range(_TRIES):
            try:
                return _form(links, rank, size, patience)
            except _Retry as reason:
                why = str(reason)
    finally:
        for link in links.values():
            link.close()
    raise RuntimeError(f"gloo: no listener could be used, {_TRIES} times in a row: {why}")


def _form(links: dict[int, socket.socket], rank: int, size: int, patience: timedelta) -> ProcessGroupGloo:
    device = _Device()
    with contextlib.ExitStack() as own:
        callers = {other: own.enter_context(socket.socket()) for other in links}
        for caller in callers.values():
            caller.bind((_HOST, 0))
        names = {caller.getsockname(): other for other, caller in callers.items()}
        device.admit(port for _, port in names)
        for caller in callers.values():
            caller.connect(device.address)
        accepted = device.wait_accepted(names)
        for other, caller in callers.items():
            caller.sendall(struct.pack("<q", other))
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub lacks it
        options._devices, options._timeout = [device.device], patience
        store = keep_alive(_OwnAddress(device.address[1]))
        group = ProcessGroupGloo(store, rank, size, options)
        device.admit(())
        for other, descriptor in accepted.items():
            device.replace(descriptor, links[other])
    return group


@functools.cache
def find_lack() -> str:
    """What this system lacks for `form`, the same for all members on it; empty where it lacks nothing. Other processes
    have no influence on the answer. Sandboxes such as gVisor have no socket filters."""
    if sys.platform != "linux":
        return "the system is not Linux"
    with socket.create_server((_HOST, 0)) as listener, select.epoll() as poll:
        try:
            _attach_filter(listener, [_ADMIT])
        except OSError as error:
            return f"the kernel takes no socket filter: {error.strerror}"
        poll.register(listener)
        if listener.fileno() not in _read_poll_set(poll.fileno()):
            return "/proc/self/fdinfo does not show what is in an epoll set"
    return ""


class _OwnAddress(Store):
    """What gloo reads at a rendezvous: for each peer this member's own entry, with an address above its own."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._sought, self._entry = struct.pack("=H", socket.AF_INET) + struct.pack("!H4B", port, 127, 0, 0, 1), b""

    def set(self, key: str, value: Any) -> None:
        at = bytes(value).find(self._sought)
        if at < 0:
            raise _refusal("its members' addresses have another form")
        at += len(self._sought)
        self._entry = bytes(value[: at - len(_ABOVE)]) + _ABOVE + bytes(value[at:])

    def get(self, key: str) -> bytes:
        return self._entry

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Every entry is there."""

    def has_extended_api(self) -> bool:
        return False


class _Device:
    """gloo's device: a listener, and the thread that waits for all of gloo's sockets with one epoll set."""

    def __init__(self) -> None:
        with _creating:
            self._before = set(_descriptors().values())
            self.device: Any = ProcessGroupGloo.create_device(hostname=_HOST, lazy_init=False)
            listeners = {number for number in self._list_new_sockets() if _is_listening(number)}
        polls = [number for number, kind in _descriptors().items() if "eventpoll" in kind]
        found = [(poll, listener) for poll in polls for listener in _read_poll_set(poll).keys() & listeners]
        if len(found) != 1:
            raise _Retry(f"{len(found)} new listeners are in an epoll set, expected one")
        self._poll, self._listener = found[0]
        with _borrow(self._listener) as listener:
            self.address: tuple[str, int] = listener.getsockname()

    def _list_new_sockets(self) -> list[int]:
        """Sockets that are not older than the device. Their inodes are compared: numbers are used again."""
        there = _descriptors().items()
        return [number for number, kind in there if kind.startswith("socket:") and kind not in self._before]

    def admit(self, ports: Iterable[int]) -> None:
        """From now on the listener, and what it accepts, gets packets from these ports of 127.0.0.1 alone."""
        program = [_LOAD_SOURCE_HOST, (0x15, 1, 0, 0x7F000001), _DROP, _LOAD_SOURCE_PORT]
        for port in ports:
            program += [(0x15, 0, 1, port), _ADMIT]  # unless it is this port, jump over what follows
        program.append(_DROP)
        try:
            with _borrow(self._listener) as listener:
                _attach_filter(listener, program)
        except OSError as error:
            raise _refusal(f"this kernel takes no socket filter: {error}") from error

    def wait_accepted(self, names: dict[Any, int]) -> dict[int, int]:
        """The descriptors that gloo accepted from the sockets of these `names`, by rank.

        gloo accepts in order and in one thread: with ours there is also each stranger that came before the filter.
        """
        until = time.monotonic() + _ACCEPT_S
        complete = False
        while True:
            accepted = dict(self._list_accepted())
            if any(name not in names for name in accepted.values()):
                raise _Retry("another process was faster in connecting to it")
            if complete:
                return {names[name]: number for number, name in accepted.items()}
            if complete := len(accepted) == len(names):
                continue  # /proc is read number by number: a stranger's may have come behind the place that was read
            if time.monotonic() > until:
                raise RuntimeError("gloo: its event loop accepted no connection in time")
            time.sleep(_LOOK_S)

    def _list_accepted(self) -> Iterator[tuple[int, Any]]:
        """Descriptor and peer of what gloo has accepted; None for a peer that is gone."""
        for number in self._list_new_sockets():
            with contextlib.suppress(OSError), _borrow(number) as connection:  # closed since it was listed
                if number != self._listener and connection.getsockname() == self.address:
                    yield number, _peer(connection)

    def replace(self, number: int, link: socket.socket) -> None:
        """Puts `link` in the place of gloo's socket `number`."""
        events, data = _read_poll_set(self._poll)[number]
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._control(_CTL_DEL, number, 0, 0)
        os.dup2(link.fileno(), number, inheritable=False)
        self._control(_CTL_ADD, number, events, data)

    def _control(self, operation: int, number: int, events: int, data: int) -> None:
        if _libc.epoll_ctl(self._poll, operation, number, ctypes.byref(_EpollEvent(events, data))):
            error = ctypes.get_errno()
            raise RuntimeError(f"gloo: epoll_ctl failed: {os.strerror(error)}")


def _attach_filter(sock: socket.socket, program: Sequence[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _refusal(why: str) -> TrainError:
    return TrainError(
        f"the gloo of torch {torch.__version__} cannot be given proven connections: {why}",
        hint="use torch 2.13, on Linux with socket filters and /proc/self/fdinfo",
    )


def _descriptors() -> dict[int, str]:
    """Open descriptors of this process, and what they are: `socket:[inode]`, `anon_inode:[eventpoll]`, …"""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _read_poll_set(poll: int) -> dict[int, tuple[int, int]]:
    """The descriptors in an epoll set, with their events and data (proc(5)).

    Left out are numbers of other files. An epoll set names a file by the number that it had when it was entered, maybe
    in another process: a fork shares the sets of its parent, which continues to enter what it accepts.
    """
    try:
        lines = Path(f"/proc/self/fdinfo/{poll}").read_text()
    except OSError:  # closed since it was listed
        return {}
    return {
        int(number): (int(events, 16), int(data, 16))
        for number, events, data, inode in _REGISTERED.findall(lines)
        if _read_inode(int(number)) == int(inode, 16)
    }


def _read_inode(number: int) -> int:
    """The inode of a descriptor; -1 for one that is not open."""
    try:
        return os.fstat(number).st_ino
    except OSError:
        return -1


@contextlib.contextmanager
def _borrow(number: int) -> Iterator[socket.socket]:
    """A socket of gloo's. Raises OSError for what is none."""
    with socket.socket(fileno=os.dup(number)) as copy:
        yield copy


def _is_listening(number: int) -> bool:
    try:
        with _borrow(number) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:  # a pipe or an event
        return False


def _peer(connection: socket.socket) -> Any:
    try:
        return connection.getpeername()
    except OSError:
        return None

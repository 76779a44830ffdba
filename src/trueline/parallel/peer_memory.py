"""Reads the memory of another process of this user on the same machine: one copy, where a socket takes three.

process_vm_readv(2), Linux. The kernel may refuse it (Yama, a seccomp filter), and the other process may be on another
machine: `PeerMemory.reads` then returns False, and the caller sends over the network. Nothing is ever written into the
other process. Pids mean nothing outside of their namespace, so a random mark is read first and compared.
"""

import ctypes
import os
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

PIECE_BYTES = 16 << 20
MOST_THREADS = 4
"""Two copy nearly twice as much as one does, and the process that is read waits meanwhile."""
_MARK = torch.frombuffer(bytearray(16), dtype=torch.uint8)
"""Of this process: its bytes are chosen when they are first told, after the last fork."""
_ADDED = 64 << 10
"""Numbers that are read and added at once: they stay in the cache."""
REFUSED = threading.Event()
"""The kernel let this process read a member's mark and not its gradients: later groups do without."""
_PR_SET_PTRACER = 0x59616D61
GONE = "gloo: a member on this host has left the group"


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_Vectors = _Vector * 2
_libc = ctypes.CDLL(None, use_errno=True)


def let_siblings_read() -> None:
    """Lets what this process's parent has started read this process's memory where Yama would let no sibling, as on
    most Ubuntu hosts; elsewhere it changes nothing. Source: Documentation/admin-guide/LSM/Yama.rst of Linux."""
    _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)


class PeerMemory(NamedTuple):
    """Where the tensors of a process lie, as that process tells a peer that has proven itself."""

    pid: int
    mark: str
    mark_at: int
    at: list[int]
    """Addresses, in the order of the tensors."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "PeerMemory":
        """The memory of this process. The caller neither changes nor frees `tensors` while a peer may read them."""
        let_siblings_read()
        mark = secrets.token_bytes(16)
        _MARK.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        return cls(os.getpid(), mark.hex(), _MARK.data_ptr(), [tensor.data_ptr() for tensor in tensors])

    def reads(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Fills contiguous host `tensors` from that process; False, with some of them filled, if that fails."""
        if not self.is_marked():
            return False
        pieces = [piece for at, tensor in zip(self.at, tensors, strict=True) for piece in _cut(at, tensor)]
        large = sum(tensor.nbytes for tensor in tensors) // PIECE_BYTES
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), large)
        if threads < 2:
            return all(self._read(*piece) for piece in pieces)
        with ThreadPoolExecutor(threads, "peer_memory") as pool:
            found = pool.map(lambda first: all(self._read(*one) for one in pieces[first::threads]), range(threads))
            return all(list(found))

    def is_marked(self) -> bool:
        """Whether it is that process, and it has not changed its mark."""
        mark = torch.zeros(16, dtype=torch.uint8)
        return self.fill(self.mark_at, mark) and bytes(mark.numpy()).hex() == self.mark

    def fill(self, at: int, tensor: torch.Tensor) -> bool:
        """Fills a contiguous host tensor from address `at`, whatever lies there; False if that fails."""
        return all(self._read(*piece) for piece in _cut(at, tensor))

    def _read(self, at: int, into: int, size: int) -> bool:
        here, there = _Vector(into, size), _Vector(at, size)
        return bool(_read_memory(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == size)


class HostMemories:
    """The memory of the members of this host, by rank."""

    def __init__(self, memories: dict[int, PeerMemory]) -> None:
        self._members = {
            rank: (memory.pid, memory.mark_at, bytes.fromhex(memory.mark)) for rank, memory in memories.items()
        }

    def add(self, own: torch.Tensor, at: dict[int, int]) -> None:
        """Adds what lies at these addresses of other members to `own`, in the order of `at`: piece by piece, so that a
        piece of `own` is taken from memory and put back once. Raises RuntimeError when a member has left the group."""
        room = torch.empty(min(_ADDED, len(own)), dtype=own.dtype)
        width, last = own.element_size(), (len(own) - 1) // _ADDED * _ADDED
        for start in range(0, len(own), _ADDED):
            part = own[start : start + _ADDED]
            theirs = room[: len(part)]
            into, size = theirs.data_ptr(), theirs.nbytes
            for other, address in at.items():
                self._read(other, address + start * width, into, size, end=start == last)
                part += theirs

    def fill(self, into: torch.Tensor, member: int, at: int) -> None:
        """Fills a contiguous tensor from a member's memory. Raises RuntimeError when it has left the group."""
        end = into.nbytes
        for start in range(0, max(1, end), PIECE_BYTES):
            size = min(PIECE_BYTES, end - start)
            self._read(member, at + start, into.data_ptr() + start, size, end=start + size == end)

    def _read(self, member: int, at: int, into: int, size: int, *, end: bool) -> None:
        """Reads whatever lies there, and at the `end` the mark, which tells that all was whole."""
        pid, mark_at, mark = self._members[member]
        if not end:
            here, there = _Vector(into, size), _Vector(at, size)
            whole = _read_memory(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == size
        else:
            found = ctypes.create_string_buffer(len(mark))
            both = _Vectors(_Vector(into, size), _Vector(ctypes.addressof(found), len(mark)))
            theirs = _Vectors(_Vector(at, size), _Vector(mark_at, len(mark)))
            whole = _read_memory(pid, both, 2, theirs, 2, 0) == size + len(mark) and found.raw == mark
        if not whole:
            if PeerMemory(pid, mark.hex(), mark_at, []).is_marked():  # it is there: other memory of it cannot be read
                REFUSED.set()
            raise RuntimeError(GONE)


def _cut(at: int, tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """The pieces of a tensor at address `at`: where each begins there, where here, and its bytes."""
    into, size = tensor.data_ptr(), tensor.nbytes
    return [(at + start, into + start, min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES)]


def _find_read() -> "ctypes._NamedFuncPointer | None":
    read = getattr(_libc, "process_vm_readv", None)
    if read is not None:
        read.restype = ctypes.c_ssize_t
        read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    return read


_read_memory = _find_read() or (lambda *_: -1)

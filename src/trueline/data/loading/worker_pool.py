"""Reader processes that prefetch batches, for data sets that decode, crop or tokenise in Python.

A thread would compete with the training for the interpreter. Each reader is a fork of the worker, made before the
worker starts threads, and uses no device. It gets requests for whole batches and returns them in shared memory:

    worker ──(number, epoch) + memfd of indices──▶ reader: SeededReader.read
    worker ◀──(number, size)  + memfd of tensors── reader

Random numbers are seeded for each record (`seeding.py`), so any number of readers gives the same training. A memfd has
no name, so a process that dies leaves nothing behind. When a reader dies its worker ends too (`ReaderLost`); the master
replaces it, and tries records one by one to find the cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import mmap
import os
import pickle
import signal
import socket
import struct
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from trueline.data.loading.seeding import SeededReader
from trueline.data.order.permutation import Indices
from trueline.data.source import Batch, Readable, Source
from trueline.errors import DataError, TruelineError, UsageError, find_error_class

if TYPE_CHECKING:
    import torch


_HEAD = struct.Struct("!qqq")
"""Number of the request, its epoch or success, bytes after the tensors."""
_ALIGNMENT = 64
_PR_SET_PDEATHSIG = 1
REAL_S, MOST_KEPT_BYTES = 1.0, 64 << 20
"""For how long a trial reads all records that it asks for, and what is kept of them for it afterwards."""


class ReaderLost(RuntimeError):
    """A reader process died, so this process cannot read any more."""


def make_reader(
    source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch, *, readers: int = 0
) -> SeededReader | ReaderPool:
    """Reads `source` in `readers` processes if it may be forked, otherwise in this process."""
    if readers and getattr(source, "forks", False):
        return ReaderPool(source, seed, place, count=readers)
    return SeededReader(source, seed, place)


class ReaderPool:
    """A SeededReader in `count` processes; to be made in the main thread, before others are started."""

    def __init__(
        self, source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch, *, count: int
    ) -> None:
        self._place = place
        self.ahead = count
        """How many batches may be prefetched."""
        self._numbers = 0
        self._coming: dict[tuple[int, bytes], tuple[_ReaderProcess, int]] = {}
        self._readers: list[_ReaderProcess] = []
        for _ in range(count):
            self._readers.append(_ReaderProcess(source, seed, siblings=self._readers))
        self.close: Callable[[], object] = weakref.finalize(self, _end, os.getpid(), self._readers)
        """Ends the processes, as the end of this object and of this process do."""

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        """The records `indices` of `epoch`. Raises DataError, ReaderLost."""
        key = epoch, indices.tobytes()
        if key not in self._coming:
            for reader, number in self._coming.values():  # others were requested: the members changed
                reader.drop(number)
            self._coming.clear()
            self._ask(key, indices)
        reader, number = self._coming.pop(key)
        return self._place(reader.take(number))

    def prefetch(self, indices: Indices, *, epoch: int) -> None:
        """Requests `indices` and returns at once; does nothing when enough are under way."""
        key = epoch, indices.tobytes()
        if len(self._coming) < self.ahead and key not in self._coming and len(indices):
            self._ask(key, indices)

    def read_ahead(self, indices: Indices, *, epoch: int) -> Batch | None:
        """None: the processes read ahead by themselves."""
        return None

    def _ask(self, key: tuple[int, bytes], indices: Indices) -> None:
        reader = min(self._readers, key=lambda reader: len(reader.waiting))
        self._numbers += 1
        reader.ask(self._numbers, key[0], indices)
        self._coming[key] = reader, self._numbers


def _end(owner: int, readers: list[_ReaderProcess]) -> None:
    if os.getpid() == owner:  # not a fork of it
        for reader in readers:
            reader.close()


class ReaderClient:
    """Requests batches of the SeededReader that serves the other end of `line`."""

    ahead = 0

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.waiting: list[int] = []
        self._dropped: set[int] = set()
        self._results: dict[int, Batch | DataError] = {}
        self._numbers = 0

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        """The records `indices` of `epoch`. Raises DataError, ReaderLost."""
        self._numbers += 1
        self.ask(self._numbers, epoch, indices)
        return self.take(self._numbers)

    def ask(self, number: int, epoch: int, indices: Indices) -> None:
        """Sends a request. Raises ReaderLost."""
        try:
            send(self.line, number, epoch, indices.tobytes())
        except OSError as error:
            raise self._lost_error() from error
        self.waiting.append(number)

    def drop(self, number: int) -> None:
        """Discards the result of request `number`."""
        if self._results.pop(number, None) is None:
            self._dropped.add(number)

    def take(self, number: int) -> Batch:
        """Waits for the result of request `number`. Raises DataError, ReaderLost."""
        while number not in self._results:
            try:
                head, memory = receive(self.line)
            except OSError as error:
                raise self._lost_error() from error
            if memory is None:
                raise self._lost_error()
            answered, succeeded, size = head
            self.waiting.remove(answered)
            if answered in self._dropped:
                self._dropped.discard(answered)
            elif succeeded:
                self._results[answered] = Batch(*_Unpickler(memory, size).load())
            else:
                code, message, hint = pickle.loads(memory[len(memory) - size :])
                kind = find_error_class(code, DataError)
                self._results[answered] = (kind if issubclass(kind, DataError) else DataError)(message, hint=hint)
        result = self._results.pop(number)
        if isinstance(result, DataError):
            raise result
        return result

    def _lost_error(self) -> ReaderLost:
        return ReaderLost("the process that reads records died while it read")


class _ReaderProcess(ReaderClient):
    """The worker's side of one reader process."""

    def __init__(self, source: Source, seed: int, *, siblings: list[_ReaderProcess]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads that may hold locks; torch's only wait for work, which a reader never has.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            for line in (mine, *(sibling.line for sibling in siblings)):
                line.close()
            _run_reader(theirs, source, seed, parent)
        theirs.close()
        super().__init__(mine)

    def _lost_error(self) -> ReaderLost:
        return ReaderLost(f"reader process {self.pid} died while it read records ahead")

    def close(self) -> None:
        self.line.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it is dead
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _run_reader(line: socket.socket, source: Source, seed: int, parent: int) -> NoReturn:
    """Runs in the reader process, and ends with the worker, which may have ended before."""
    code = 1
    gc.freeze()  # destructors of the worker's objects may wait for threads, which a fork does not have
    try:
        end_with_parent(parent)
        _serve(line, SeededReader(source, seed))
        code = 0
    finally:
        os._exit(code)  # skips the worker's cleanup


def end_with_parent(parent: int) -> None:
    """Ends this fork with the process `parent`, or at once if that has ended; leaves Ctrl-C to it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        os._exit(0)


def _serve(line: socket.socket, reader: SeededReader) -> None:
    import torch

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    while True:
        head, memory = receive(line)
        if memory is None:
            return
        answer_request(line, head, memory, reader)


class ReadMemory:
    """Answers requests for records that take long, and were read before, without reading them again.

    The first `REAL_S` seconds are real reads, and so are the first two of the same records: a data set that draws from
    a generator of its own gives others the second time. These are never answered from here.
    """

    def __init__(self) -> None:
        self._read_s, self._bytes = 0.0, 0
        self._kept: dict[tuple[int, bytes], tuple[list[bytes], bytes]] = {}
        self._times: dict[tuple[int, bytes], int] = {}
        """How often the same was read; 0 after something else was."""
        self.read = set[int]()
        """All records that were read."""

    def find(self, indices: Indices, epoch: int) -> tuple[list[bytes], bytes] | None:
        """What was read of `indices`, packed; None: they are to be read."""
        key = epoch, indices.tobytes()
        return self._kept[key] if self._read_s > REAL_S and self._times.get(key, 0) > 1 else None

    def note(self, indices: Indices, epoch: int, packed: tuple[Sequence[memoryview], bytes], took_s: float) -> None:
        """Keeps what was read in `took_s` seconds."""
        self._read_s += took_s
        self.read.update(indices.tolist())
        key, found = (epoch, indices.tobytes()), ([bytes(tensor) for tensor in packed[0]], packed[1])
        size = len(found[1]) + sum(map(len, found[0]))
        if key in self._kept:
            same = self._kept[key] == found and self._times[key]
            self._times[key] = self._times[key] + 1 if same else 0
        elif self._bytes + size <= MOST_KEPT_BYTES:
            self._bytes += size
            self._kept[key], self._times[key] = found, 1


def _pack(batch: Batch) -> tuple[list[memoryview], bytes]:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump((batch.inputs, batch.labels))
    return pickler.tensors, stream.getvalue()


def answer_request(
    line: socket.socket, head: tuple[int, int, int], memory: mmap.mmap, reader: Readable, kept: ReadMemory | None = None
) -> None:
    """Reads what a ReaderClient has requested, unless `kept` has it, and sends it."""
    number, epoch, size = head
    try:
        indices = np.frombuffer(memory, np.int64, count=size // 8)
        packed: tuple[Sequence[memoryview | bytes], bytes] | None = kept.find(indices, epoch) if kept else None
        if packed is None:
            began = time.monotonic()
            packed = fresh = _pack(reader.read(indices, epoch=epoch))
            if kept is not None:
                kept.note(indices, epoch, fresh, time.monotonic() - began)
        (tensors, rest), succeeded = packed, True
    except Exception as error:  # noqa: BLE001  the process boundary: the client raises it
        if not isinstance(error, UsageError):
            traceback.print_exc()
        if not isinstance(error, TruelineError):
            error = DataError(f"reading fails: {type(error).__name__}: {error}")
        tensors, rest, succeeded = [], pickle.dumps((error.code, error.message, error.hint)), False
    send(line, number, succeeded, rest, tensors)


class _Pickler(pickle.Pickler):
    """Collects tensors in `tensors` and pickles their offsets in the memory: multiples of 64 bytes. A pickle of what
    contains them follows there. The process that unpickles it is the parent of the one that wrote it."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[memoryview] = []
        self._at = 0

    def persistent_id(self, value: Any) -> tuple[int, str, tuple[int, ...]] | None:
        import torch

        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        self.tensors.append(flat.numpy().data)
        at = self._at
        self._at = _align(at + flat.numel())
        return at, str(value.dtype).removeprefix("torch."), tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Makes tensors of `memory`, which stays mapped as long as one of them exists."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        super().__init__(io.BytesIO(memory[len(memory) - size :]))
        self._memory = memory

    def persistent_load(self, where: Any) -> torch.Tensor:
        import torch

        at, name, shape = where
        dtype: torch.dtype = getattr(torch, name)
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).reshape(shape)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def send(line: socket.socket, number: int, word: int, rest: bytes, tensors: Sequence[memoryview | bytes] = ()) -> None:
    """Sends memory with `tensors` and, at its end, `rest`."""
    handle = os.memfd_create("trueline-batch", os.MFD_CLOEXEC)
    try:
        size = sum(_align(len(tensor)) for tensor in tensors)
        os.ftruncate(handle, size + len(rest))
        with mmap.mmap(handle, 0) as memory:
            at = 0
            for tensor in tensors:
                memory[at : at + len(tensor)] = tensor
                at += _align(len(tensor))
            memory[at : at + len(rest)] = rest
        socket.send_fds(line, [_HEAD.pack(number, word, len(rest))], [handle])
    finally:
        os.close(handle)


def receive(line: socket.socket) -> tuple[tuple[int, int, int], mmap.mmap | None]:
    """The next message with its memory; None when the other side has closed."""
    head, handles, _, _ = socket.recv_fds(line, _HEAD.size, 1)
    if not head:
        return (0, 0, 0), None
    number, word, size = _HEAD.unpack(head)
    try:
        return (number, word, size), mmap.mmap(handles[0], 0)
    finally:
        os.close(handles[0])

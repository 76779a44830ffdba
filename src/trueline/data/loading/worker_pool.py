"""Processes that read records ahead of the training, for data sets whose reading is Python's work.

A map-style Dataset decodes, crops and tokenises in Python, one record after the other, and so may the `feed` of records
in files; a thread would only take turns with the training. Each of these processes is a fork of the worker, made before
the worker has threads of its own, and touches no device; it is asked for whole batches, and answers in memory that both
see:

    worker ──(number, epoch) + memfd of indices──▶ reader: SeededReader.read
    worker ◀──(number, size)  + memfd of tensors── reader

What a batch is does not depend on who reads it: random numbers are the record's own (`seeded.py`), so any number of
readers gives the same training. Memory is bounded by the batches that are asked for ahead, `ahead` in all. A memfd
has no name, so nothing is left behind by whoever dies. A reader that dies takes its worker with it (`ReaderLost`):
the master replaces the worker, and tries the records one by one where one of them is to blame.
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
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.data.loading.seeding import SeededReader
from trueline.data.source import Batch, Forkable, Source
from trueline.errors import DataError, TruelineError

if TYPE_CHECKING:
    import torch

    from trueline.data.source import Indices

_HEAD = struct.Struct("!qqq")
"""Number of the request, its epoch or whether it succeeded, bytes of what lies behind the tensors."""
_ALIGNMENT = 64
_PR_SET_PDEATHSIG = 1


class ReaderLost(RuntimeError):
    """A reader died; this process cannot read any more."""


def make_reader(
    source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch, *, readers: int = 0
) -> SeededReader | ReaderPool:
    """Who reads `source` for a worker: `readers` processes if that can be, else this process.

    It can where a fork may go on with what this process has opened, or opens it again for itself (`Forkable`).
    """
    if readers and isinstance(source, Forkable) and source.forks:
        return ReaderPool(source, seed, place, count=readers)
    return SeededReader(source, seed, place)


class ReaderPool:
    """`count` processes that do what a SeededReader does; make it in the main thread, before others are started."""

    prefetches = True

    def __init__(
        self, source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch, *, count: int
    ) -> None:
        self._place = place
        self._numbers = 0
        self._coming: dict[tuple[int, bytes], tuple[_ReaderProcess, int]] = {}
        self._readers: list[_ReaderProcess] = []
        for _ in range(count):
            self._readers.append(_ReaderProcess(source, seed, siblings=self._readers))
        self.close: Callable[[], object] = weakref.finalize(self, _end, os.getpid(), self._readers)
        """Ends the processes; so does the end of this object, and of this process."""

    @property
    def ahead(self) -> int:
        """So many batches may be asked for before they are read."""
        return len(self._readers)

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        """The records `indices` of `epoch`. Raises DataError, ReaderLost."""
        key = epoch, indices.tobytes()
        if key not in self._coming:
            for reader, number in self._coming.values():  # what was expected did not come: the members changed
                reader.let_go(number)
            self._coming.clear()
            self._ask(key, indices)
        reader, number = self._coming.pop(key)
        return self._place(reader.take(number))

    def prefetch(self, indices: Indices, *, epoch: int) -> None:
        """Has `indices` read meanwhile, and returns at once; does nothing when enough is under way."""
        key = epoch, indices.tobytes()
        if len(self._coming) < self.ahead and key not in self._coming and len(indices):
            self._ask(key, indices)

    def read_ahead(self, indices: Indices, *, epoch: int) -> None:
        """Nothing: the processes read while this one computes, and need no time of its own."""

    def _ask(self, key: tuple[int, bytes], indices: Indices) -> None:
        reader = min(self._readers, key=lambda one: len(one.waiting))
        self._numbers += 1
        reader.ask(self._numbers, key[0], indices)
        self._coming[key] = reader, self._numbers


def _end(owner: int, readers: list[_ReaderProcess]) -> None:
    if os.getpid() == owner:  # and not a fork of it
        for reader in readers:
            reader.close()


class _ReaderProcess:
    """This side of one process."""

    line: socket.socket

    def __init__(self, source: Source, seed: int, *, siblings: list[_ReaderProcess]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads that hold locks; torch's own only wait for work, which a reader never gives them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            for line in (mine, *(one.line for one in siblings)):
                line.close()
            _live(theirs, source, seed, parent)
        theirs.close()
        self.line = mine
        self.waiting: list[int] = []
        self._needless: set[int] = set()
        self._here: dict[int, Batch | DataError] = {}

    def ask(self, number: int, epoch: int, indices: Indices) -> None:
        """Sends a request. Raises ReaderLost."""
        try:
            _send(self.line, number, epoch, indices.tobytes())
        except OSError as error:
            raise self._lost_error() from error
        self.waiting.append(number)

    def let_go(self, number: int) -> None:
        """Nobody will take the answer to `number`."""
        if self._here.pop(number, None) is None:
            self._needless.add(number)

    def take(self, number: int) -> Batch:
        """The answer to `number`, when it is there. Raises DataError, ReaderLost."""
        while number not in self._here:
            try:
                head, memory = _receive(self.line)
            except OSError as error:
                raise self._lost_error() from error
            if memory is None:
                raise self._lost_error()
            answered, succeeded, size = head
            self.waiting.remove(answered)
            if answered in self._needless:
                self._needless.discard(answered)
            else:
                self._here[answered] = _decode_batch(memory, size) if succeeded else _refusal(memory, size)
        found = self._here.pop(number)
        if isinstance(found, DataError):
            raise found
        return found

    def _lost_error(self) -> ReaderLost:
        return ReaderLost(f"reader process {self.pid} died while it read records ahead")

    def close(self) -> None:
        self.line.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # dead already
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _live(line: socket.socket, source: Source, seed: int, parent: int) -> None:
    """The life of a reader; it ends with the worker, which may have ended already."""
    code = 1
    gc.freeze()  # the destructor of what the worker left behind may wait for threads, which a fork does not have
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() == parent:
            _serve(line, SeededReader(source, seed))
        code = 0
    finally:
        os._exit(code)  # nothing of the worker's is to be cleaned up here


def _serve(line: socket.socket, reader: SeededReader) -> None:
    import torch

    torch.set_num_threads(1)  # a fork has none of the threads that its parent computed with
    while True:
        head, memory = _receive(line)
        if memory is None:
            return
        number, epoch, size = head
        try:
            batch = reader.read(np.frombuffer(memory, np.int64, count=size // 8), epoch=epoch)
            tensors, rest = _encode_batch(batch)
            succeeded = True
        except Exception as error:  # noqa: BLE001  the process boundary: whoever asked is told, and goes on
            traceback.print_exc()
            tensors, rest, succeeded = [], pickle.dumps(_describe_error(error)), False
        _send(line, number, succeeded, rest, tensors)


def _describe_error(error: Exception) -> tuple[str, str]:
    if isinstance(error, TruelineError):
        return error.message, error.hint
    return f"reading fails: {type(error).__name__}: {error}", ""


# What goes through the memory: tensors one after the other, each at a multiple of 64 bytes, and then a pickle of
# what they lie in, written by a fork of the process that reads it.


class _Pickler(pickle.Pickler):
    """Leaves the tensors to `tensors` and writes where they will lie."""

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


def _encode_batch(batch: Batch) -> tuple[list[memoryview], bytes]:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump((batch.inputs, batch.labels))
    return pickler.tensors, stream.getvalue()


def _decode_batch(memory: mmap.mmap, size: int) -> Batch:
    """The batch; its tensors lie in `memory`, which stays as long as one of them does."""
    return Batch(*_Unpickler(memory, size).load())


def _refusal(memory: mmap.mmap, size: int) -> DataError:
    message, hint = pickle.loads(memory[len(memory) - size :])
    return DataError(message, hint=hint)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _send(line: socket.socket, number: int, word: int, rest: bytes, tensors: Sequence[memoryview] = ()) -> None:
    """Hands over memory with `tensors` and, at its end, `rest`. The message itself is small and never waits long."""
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


def _receive(line: socket.socket) -> tuple[tuple[int, int, int], mmap.mmap | None]:
    """The next message with its memory; none when the other side has closed."""
    head, handles, _, _ = socket.recv_fds(line, _HEAD.size, 1)
    if not head:
        return (0, 0, 0), None
    number, word, size = _HEAD.unpack(head)
    try:
        return (number, word, size), mmap.mmap(handles[0], 0)
    finally:
        os.close(handles[0])

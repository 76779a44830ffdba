"""A state as it was at one moment, while training continues: copied only where training is faster than its readers.

Parameters and optimizer state change in one place, the optimizer's step. Until then a reader (the writer of a
checkpoint, the sender of a state) reads them where they are, in pieces. Before the change `settle` copies what was not
read yet. So neither a whole copy nor its time is needed, and nothing holds the interpreter's lock for a whole state.
Where the state is written to a disk anyway (`spill`), the change waits until the rest fits the memory that there is for
it: to write it elsewhere would take as long. What a reader that is stopped has left waits in a file without a name.
An optimizer whose operators can be watched (`change_watch.py`) begins at once: `begin_change`, `release` for what an
operator is about to change, `end_change`.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trueline.checkpoint import tree
from trueline.errors import CheckpointError
from trueline.storage.direct_file import ALIGNMENT, DirectFile, make_buffer

_Numbered = list[tuple[int, torch.Tensor]]
PIECE_BYTES = 8 << 20
LEAST_LIVE = 1 << 20
"""Bytes of a tensor below which it is copied at once."""
LEAST_SPILLED = 64 << 20
"""Bytes of a rest below which it is copied in memory."""
GLANCES = 64
"""Bytes of a tensor that are compared, to see whether something has changed it that no operator shows."""
STILL_S = 0.25
"""A reader that has read nothing for so long is stopped: its disk is full or slow, or another one writes first."""


class Snapshot:
    """`state` (of the types that `tree.encode` takes) for a number of readers, each of which reads every tensor once.

    `live` tells of a tensor whether it stays as it is until `settle`; all others are copied at once. `patience`:
    how long `settle` waits for the readers before it copies, as a part of the time since the snapshot was taken.
    `spill`: a folder on the disk to which the only reader writes, for what `settle` copies if that is much.
    """

    def __init__(
        self,
        state: Any,
        *,
        readers: int = 1,
        patience: float = 0.0,
        live: Callable[[torch.Tensor], bool] = lambda _: False,
        spill: Path | None = None,
    ) -> None:
        self.skeleton, tensors = tree.encode(state)
        self.layout = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
        """Shapes and dtypes, without memory."""
        self.total = readers * sum(tensor.nbytes for tensor in self.layout)
        self.moved = 0  # bytes that were read
        self.torn = False  # a tensor was changed before `settle` was called: readers fail
        self._born, self._patience = time.monotonic(), patience
        self._unread = [readers] * len(tensors)
        self._changed = threading.Condition()
        self._spill = spill
        self._file: DirectFile | None = None
        self._rooms: list[torch.Tensor] = []
        """Of a piece each: not in use, and not to be touched for the first time again."""
        self._spill_room: mmap.mmap | None = None
        self._spilled: dict[int, int] = {}
        """Tensor -> where it begins in the file."""
        in_place = [t.is_cpu and t.is_contiguous() and t.nbytes >= LEAST_LIVE and live(t) for t in tensors]
        self._live = {i: tensors[i]._version for i, stays in enumerate(in_place) if stays}
        self._changing: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] | None = None
        """During a change that is watched: by the address of a storage the live tensors there, with glances at them."""
        self.live_bytes = sum(tensors[i].nbytes for i in self._live)
        self._shelved = 0  # bytes of the shelf
        self.shelf = torch.empty(0, dtype=torch.uint8)
        """Memory for what `settle` copies, as far as it fits, until `close`. The caller may set it."""
        self._tensors: list[torch.Tensor | None] = [
            tensor if stays else copy(tensor) for tensor, stays in zip(tensors, in_place, strict=True)
        ]
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()

    def pieces(self, index: int) -> Iterator[memoryview]:
        """The bytes of a tensor; each piece is valid until the next one is taken. Raises CheckpointError."""
        room = self._rooms.pop() if self._rooms else torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for start in range(0, self.layout[index].nbytes, PIECE_BYTES):
            piece = self._read(index, start, room)
            yield piece.numpy().data
            self.moved += len(piece)
        self._rooms.append(room)
        self._end(index)

    def read_into(self, index: int, start: int, room: memoryview) -> int:
        """Copies the bytes of a tensor from `start` on into `room`, as many as fit; returns how many. The last ones end
        the tensor for its reader. Raises CheckpointError."""
        size, count = self.layout[index].nbytes, 0
        if start < size:
            into = torch.frombuffer(room, dtype=torch.uint8)[: size - start]
            piece = self._read(index, start, into)
            count = len(piece)
            if piece.data_ptr() != into.data_ptr():
                into[:count].copy_(piece)
            self.moved += count
        if start + count == size:
            self._end(index)
        return count

    def _end(self, index: int) -> None:
        """A reader has read the tensor to its end."""
        with self._changed:
            self._unread[index] -= 1
            if not self._unread[index]:
                self._tensors[index] = None
                self._live.pop(index, None)
                self._changed.notify_all()
            if self._changing is not None and self.moved >= self.total:  # its end shows what else has changed a tensor
                self._changed.wait_for(lambda: self._changing is None)
                if self.torn:
                    raise CheckpointError("the state was changed by something that is no operator of torch's")

    def _read(self, index: int, start: int, room: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor from `start` on, as many as fit into `room`; there, unless their memory does not
        change."""
        with self._changed:
            if index in self._spilled and self._file is not None:
                return self._read_spilled(self._file, index, start, len(room))
            tensor = self._tensors[index]
            if tensor is not None:
                piece = as_bytes(tensor)[start : start + len(room)]
                if index in self._live:
                    piece = room[: len(piece)].copy_(piece)
                    self.torn = self.torn or tensor._version != self._live[index]
            if tensor is None or self.torn:
                raise CheckpointError("the state was dropped, or changed outside of the optimizer's step")
            return piece

    def _read_spilled(self, file: DirectFile, index: int, start: int, most: int) -> torch.Tensor:
        """At most `most` bytes of a tensor from `start` on, read from aligned places in the file."""
        if self._spill_room is None:
            self._spill_room = make_buffer(PIECE_BYTES + ALIGNMENT)
        before = start % ALIGNMENT
        end = before + min(most, PIECE_BYTES, self.layout[index].nbytes - start)
        whole = memoryview(self._spill_room)[: end + -end % ALIGNMENT]
        if file.read(whole, self._spilled[index] + start - before) < end:
            raise CheckpointError("the state was dropped: its file on the disk is shorter than what was written")
        return torch.frombuffer(self._spill_room, dtype=torch.uint8)[before:end]

    def settle(self) -> None:
        """Makes the snapshot independent of the live tensors, which are about to change."""
        if not self._live:
            return
        with self._changed:
            if self._patience:
                patience_s = self._patience * (time.monotonic() - self._born)
                self._changed.wait_for(lambda: not self._live, patience_s)
            elif self._spill is not None:
                self._await_reader(self._fits)
            self._copy_rest()

    def can_wait(self) -> bool:
        """Whether a change may begin before the readers have read what it changes."""
        return self._spill is not None and not self._patience and bool(self._live)

    def begin_change(self) -> None:
        """From now on `release` is called before each change of a tensor, until `end_change`."""
        with self._changed:
            self._changing = defaultdict(list)
            for index, tensor in self._rest():
                address = tensor.untyped_storage().data_ptr()
                self._changing[address].append((index, tensor, _glance(tensor)))

    def release(self, address: int) -> None:
        """Returns when the live tensors of the storage at `address` may change: they are read, or copied."""
        if not self._changing or address not in self._changing:
            return
        with self._changed:
            found = self._changing.pop(address)
            self._expect_unchanged(found)
            wanted = [index for index, _, _ in found]
            self._await_reader(lambda: self._fits() or not any(index in self._live for index in wanted))
            if not self._fits():
                if any(index in self._live for index in wanted):
                    self._copy_rest()  # the reader is stopped
                return
            rest = [(index, tensor) for index, tensor in self._rest() if index in wanted]
            shelved, others = self._split(rest)
            self._put_on_shelf(shelved)
            for index, tensor in others:
                self._tensors[index] = copy(tensor)
            for index in wanted:
                self._live.pop(index, None)

    def end_change(self) -> None:
        """What is still live was not changed, and may be by the next change."""
        with self._changed:
            for found in (self._changing or {}).values():
                self._expect_unchanged(found)
            self._changing = None
            self._changed.notify_all()

    def _expect_unchanged(self, found: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Called where no operator has changed them so far."""
        self.torn = self.torn or any(
            tensor._version != self._live.get(index, tensor._version) or not torch.equal(_glance(tensor), before)
            for index, tensor, before in found
        )

    def _copy_rest(self) -> None:
        rest = self._rest()
        self.torn = self.torn or any(tensor._version != self._live[index] for index, tensor in rest)
        shelved, rest = self._split(rest)
        self._put_on_shelf(shelved)
        spilled = self._spill is not None and _sum(rest) >= LEAST_SPILLED
        spilled = spilled and self._write(rest)
        for index, tensor in rest:
            self._tensors[index] = None if spilled else copy(tensor)
        self._live.clear()

    def _rest(self) -> _Numbered:
        """The live tensors that some reader has not read to their end."""
        return [(index, tensor) for index in self._live if (tensor := self._tensors[index]) is not None]

    def _fits(self) -> bool:
        """Whether what is left can be copied in memory."""
        return _sum(self._split(self._rest())[1]) < LEAST_SPILLED

    def _await_reader(self, done: Callable[[], bool]) -> None:
        """Returns when it is `done`, or when the reader is stopped."""
        moved = -1
        while not done() and self.moved > moved:
            moved = self.moved
            self._changed.wait_for(done, STILL_S)

    def _split(self, rest: _Numbered) -> tuple[_Numbered, _Numbered]:
        """What fits on the shelf, the last ones first, and the others."""
        room, shelved, others = len(self.shelf) - self._shelved, _Numbered(), _Numbered()
        for index, tensor in reversed(rest):
            fits = room >= tensor.nbytes
            room -= tensor.nbytes if fits else 0
            (shelved if fits else others).append((index, tensor))
        return shelved, others

    def _put_on_shelf(self, tensors: _Numbered) -> None:
        for index, tensor in tensors:
            place = self.shelf[self._shelved : self._shelved + tensor.nbytes]
            self._tensors[index] = place.copy_(as_bytes(tensor))
            self._shelved += tensor.nbytes

    def _write(self, tensors: _Numbered) -> bool:
        """Copies tensors into a file without a name; False: the disk does not take them."""
        assert self._spill is not None
        places: dict[int, int] = {}
        try:
            self._spill.mkdir(parents=True, exist_ok=True)
            self._file = DirectFile(tempfile.TemporaryFile(dir=self._spill, buffering=0))  # noqa: SIM115  `close` does
            for index, tensor in tensors:
                places[index] = self._file.align()
                for piece in torch.split(as_bytes(tensor), PIECE_BYTES):
                    self._file.write(piece.numpy().data)
            self._file.align()
            self._file.flush()
        except OSError:  # full, or it has no such files
            return False
        self._spilled = places
        return True

    def close(self) -> None:
        """Drops what was not read; readers fail."""
        with self._changed:
            self._spilled.clear()
            if self._file is not None:
                self._file.close()
            self._tensors = [None] * len(self._tensors)
            self._live.clear()
            self._changed.notify_all()


def _glance(tensor: torch.Tensor) -> torch.Tensor:
    flat = as_bytes(tensor)
    return flat[:: max(1, len(flat) // GLANCES)].clone()


def _sum(tensors: _Numbered) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory. One of a tensor on a device is complete after `torch.cuda.synchronize()`."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] The memory of a contiguous tensor in host memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)

"""A state as it was at one moment, while training continues: copied only where training is faster than its readers.

Parameters and optimizer state change in one place, the optimizer's step. Until then a reader (the writer of a
checkpoint, the sender of a state) reads them where they are, in pieces. Before the change `settle` copies what was not
read yet. So neither a whole copy nor its time is needed, and nothing holds the interpreter's lock for a whole state.
Where the state is written to a disk anyway (`spill`), the change waits until the rest fits the memory that there is for
it: to write it elsewhere would take as long. What a reader that is stopped has left waits in a file without a name.
"""

from __future__ import annotations

import tempfile
import threading
import time
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
        self._spilled: dict[int, int] = {}
        """Tensor -> where it begins in the file."""
        in_place = [t.is_cpu and t.is_contiguous() and t.nbytes >= LEAST_LIVE and live(t) for t in tensors]
        self._live = {i: tensors[i]._version for i, stays in enumerate(in_place) if stays}
        self.live_bytes = sum(tensors[i].nbytes for i in self._live)
        self.shelf = torch.empty(0, dtype=torch.uint8)
        """Memory for what `settle` copies, as far as it fits, until `close`. The caller may set it."""
        self._tensors: list[torch.Tensor | None] = [
            tensor if stays else copy(tensor) for tensor, stays in zip(tensors, in_place, strict=True)
        ]
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()

    def pieces(self, index: int) -> Iterator[memoryview]:
        """The bytes of a tensor; each piece is valid until the next one is taken. Raises CheckpointError."""
        size = self.layout[index].nbytes
        room = self._rooms.pop() if self._rooms else torch.frombuffer(make_buffer(PIECE_BYTES), dtype=torch.uint8)
        for start in range(0, size, PIECE_BYTES):
            with self._changed:
                piece = self._read(index, start, room)
                if piece is None or self.torn:
                    raise CheckpointError("the state was dropped, or changed outside of the optimizer's step")
            yield piece.numpy().data
            self.moved += len(piece)
        self._rooms.append(room)
        with self._changed:
            self._unread[index] -= 1
            if not self._unread[index]:
                self._tensors[index] = None
                self._live.pop(index, None)
                self._changed.notify_all()

    def _read(self, index: int, start: int, room: torch.Tensor) -> torch.Tensor | None:
        """The piece of a tensor that begins at `start`, in `room` unless its memory does not change; None: dropped."""
        if index in self._spilled and self._file is not None:
            wanted = min(PIECE_BYTES, self.layout[index].nbytes - start)
            whole = room[: min(len(room), wanted + -wanted % ALIGNMENT)].numpy().data
            return room[:wanted] if self._file.read(whole, self._spilled[index] + start) >= wanted else None
        tensor = self._tensors[index]
        if tensor is None:
            return None
        piece = as_bytes(tensor)[start : start + PIECE_BYTES]
        if index in self._live:
            piece = room[: len(piece)].copy_(piece)
            self.torn = self.torn or tensor._version != self._live[index]
        return piece

    def settle(self) -> None:
        """Makes the snapshot independent of the live tensors, which are about to change."""
        if not self._live:
            return
        with self._changed:
            if self._patience:
                patience_s = self._patience * (time.monotonic() - self._born)
                self._changed.wait_for(lambda: not self._live, patience_s)
            elif self._spill is not None:
                self._await_reader()
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

    def _await_reader(self) -> None:
        """Returns when what is left can be copied in memory, or when the reader is stopped."""

        def fits() -> bool:
            return _sum(self._split(self._rest())[1]) < LEAST_SPILLED

        moved = -1
        while not fits() and self.moved > moved:
            moved = self.moved
            self._changed.wait_for(fits, STILL_S)

    def _split(self, rest: _Numbered) -> tuple[_Numbered, _Numbered]:
        """What fits on the shelf, the last ones first, and the others."""
        room, shelved, others = len(self.shelf), _Numbered(), _Numbered()
        for index, tensor in reversed(rest):
            fits = room >= tensor.nbytes
            room -= tensor.nbytes if fits else 0
            (shelved if fits else others).append((index, tensor))
        return shelved, others

    def _put_on_shelf(self, tensors: _Numbered) -> None:
        shelf = self.shelf
        for index, tensor in tensors:
            self._tensors[index] = shelf[: tensor.nbytes].copy_(as_bytes(tensor))
            shelf = shelf[tensor.nbytes :]

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


def _sum(tensors: _Numbered) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory. One of a tensor on a device is complete after `torch.cuda.synchronize()`."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] The memory of a contiguous tensor in host memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)

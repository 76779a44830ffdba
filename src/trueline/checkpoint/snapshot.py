"""Copies of a state that training changes: the only part of a checkpoint that a step waits for.

The copies' memory is reused, so that the system allocates each page once. Two copies exist at most when each is
released after it was written; one that was not released is never overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trueline.checkpoint import tree


@dataclass(slots=True)
class StateSnapshot:
    """A copy of a state in host memory; valid until it is released."""

    state: Any
    _buffers: _Buffers

    def release(self) -> None:
        """Gives the memory to later copies. May be called in another thread."""
        self._buffers.busy = False


@dataclass(slots=True)
class _Buffers:
    tensors: list[torch.Tensor] = field(default_factory=list)
    busy: bool = False


class StateCopy:
    def __init__(self) -> None:
        self._sets: list[_Buffers] = []

    def take(self, state: Any) -> StateSnapshot:
        """Copies `state` (of the types that `tree.encode` takes) into free buffers."""
        skeleton, tensors = tree.encode(state)
        buffers = next((free for free in self._sets if not free.busy), None)
        if buffers is None:
            buffers = _Buffers()
            self._sets.append(buffers)
        buffers.busy = True
        old = [*buffers.tensors, *[None] * len(tensors)]
        buffers.tensors = [
            buffer
            if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
            else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for buffer, tensor in zip(old, tensors, strict=False)
        ]
        for buffer, tensor in zip(buffers.tensors, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return StateSnapshot(tree.decode(skeleton, buffers.tensors), buffers)

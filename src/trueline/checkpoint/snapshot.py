"""Copies of a state that lives on: the only part of a checkpoint that a step waits for.

The copies' memory is used again, so that no page of it is asked from the system a second time. Two copies exist at
most when their user releases each after writing it; one that was not released is never written over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trueline.checkpoint import tree


@dataclass(slots=True)
class Copied:
    """A copy of a state in host memory; valid until it is released."""

    state: Any
    _buffers: _Buffers

    def release(self) -> None:
        """Gives the memory back to later copies. May be called in another thread."""
        self._buffers.busy = False


@dataclass(slots=True)
class _Buffers:
    tensors: list[torch.Tensor] = field(default_factory=list)
    busy: bool = False


class StateCopy:
    def __init__(self) -> None:
        self._sets: list[_Buffers] = []

    def take(self, state: Any) -> Copied:
        """Copies `state` (what `tree.encode` takes) into buffers that nobody uses."""
        skeleton, tensors = tree.encode(state)
        buffers = next((found for found in self._sets if not found.busy), None)
        if buffers is None:
            buffers = _Buffers()
            self._sets.append(buffers)
        buffers.busy = True
        old = [*buffers.tensors, *[None] * len(tensors)]
        buffers.tensors = [_fitting(one, tensor) for one, tensor in zip(old, tensors, strict=False)]
        for buffer, tensor in zip(buffers.tensors, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return Copied(tree.decode(skeleton, buffers.tensors), buffers)


def _fitting(buffer: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

"""A slice that ends at a number, in `ids[:, :512]` or `cache[:, -8:]`, where a free size may be shorter than that.

torch decides by the size of the example whether the number or the size ends the slice, and the trace then holds on one
side of it alone. Here the end is the smaller of both, computed from the size. Source: Python's documentation of slices.
"""

import dis
from types import CodeType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export", helps=("ids[:, :512]", "cache[:, -8:]")
)

_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def makes_slice(code: CodeType) -> bool:
    """Whether code, or a function or comprehension inside of it, has a slice."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(step.opname == "BUILD_SLICE" for step in dis.Bytecode(code)) or any(map(makes_slice, inside))


class FreeSlices(TorchFunctionMode):
    """Traces slices along free dimensions for sizes on both sides of their ends."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXED and isinstance(args[0], torch.Tensor):
            args = (args[0], _free_index(args[0], args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _free_index(tensor: torch.Tensor, index: Any) -> Any:
    """`index` with free ends; unchanged where it is not known how many dimensions one of its parts indexes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    counts = [_count_axes(part) for part in parts]
    if not any(isinstance(part, slice) for part in parts) or None in counts:
        return index
    axis, rest = 0, tensor.ndim - sum(count or 0 for count in counts)
    for at, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if isinstance(part, slice) and axis < tensor.ndim:
            parts[at] = _free_slice(part, tensor.shape[axis])
        axis += rest if part is Ellipsis else count or 0
    return tuple(parts) if isinstance(index, tuple) else parts[0]


def _count_axes(part: Any) -> int | None:
    """The dimensions of the indexed tensor that a part of an index takes; None where that is not known."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, torch.Tensor):
        return part.ndim if part.dtype in (torch.bool, torch.uint8) else 1
    return 1 if isinstance(part, slice | int | torch.SymInt) and not isinstance(part, bool) else None


def _free_slice(part: slice, size: Any) -> slice:
    ends = part.start, part.stop
    if not isinstance(size, torch.SymInt) or any(isinstance(end, torch.Tensor) for end in ends):
        return part
    start, stop = (_free_end(end, size) for end in ends)
    if start is part.start and stop is part.stop:
        return part
    if start is not None and stop is not None and not _are_ordered(*ends):
        stop = torch.sym_max(start, stop)  # type: ignore[no-untyped-call]  # an empty slice
    return slice(start, stop, part.step)


def _free_end(end: Any, size: torch.SymInt) -> Any:
    if not isinstance(end, int) or statically_known_true(size >= abs(end)):
        return end
    return torch.sym_min(size, end) if end >= 0 else torch.sym_max(size + end, 0)  # type: ignore[no-untyped-call]


def _are_ordered(start: Any, stop: Any) -> bool:
    """Whether no size makes the slice end before it starts."""
    return isinstance(start, int) and isinstance(stop, int) and start <= stop and (start < 0) == (stop < 0)

"""A position that a tensor holds, in `cache[:, position] = x` or `cache[:, position:position + n]`, stays a tensor in a
trace.

torch reads the number out of a tensor without dimensions, and torch.export stops at a number that values choose. An
index of one element selects the same; a slice from a position, of a length that is known, is an index of that length.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="torch 2.13", cost="a second export", helps=("cache step", "ring buffer"))

_ADDS = frozenset({"__add__", "__radd__", "add"})


def may_help(message: str) -> bool:
    """Whether torch.export failed because code reads values."""
    return "data-dependent" in message or "DataDependent" in message


class TensorPositions(TorchFunctionMode):
    """Traces indices that tensors hold as tensors. `replaced` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        """Id of a sum -> the sum, the position that it was made of, and what was added."""
        self.replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ADDS and len(args) == 2 and not kwargs:
            return self._add(func, *args)
        if name == "__getitem__" and isinstance(args[0], torch.Tensor):
            found = self._index(args[0], args[1])
            if found is not None:
                index, axis, single = found
                taken = func(args[0], index)
                return taken.squeeze(axis) if single else taken
        if name == "__setitem__" and isinstance(args[0], torch.Tensor):
            found = self._index(args[0], args[1])
            if found is not None:
                index, axis, single = found
                value = args[2]
                if single and isinstance(value, torch.Tensor):
                    value = _with_axis(value, axis, _num_dims(args[0], index))
                return func(args[0], index, value)
        return func(*args, **kwargs)

    def _add(self, func: Any, one: Any, other: Any) -> Any:
        result = func(one, other)
        for position, length in ((one, other), (other, one)):
            if _is_position(position) and isinstance(length, int | torch.SymInt) and isinstance(result, torch.Tensor):
                self._ends[id(result)] = result, position, length
        return result

    def _index(self, tensor: torch.Tensor, index: Any) -> tuple[tuple[Any, ...], int, bool] | None:
        """The index with a tensor of one dimension in it, that dimension of the result, and whether it is of one
        element; None where no position is in it, or more than one is."""
        parts = list(index) if isinstance(index, tuple) else [index]
        places = [i for i, part in enumerate(parts) if _is_position(part) or self._bounds(part) is not None]
        others = [part for i, part in enumerate(parts) if i not in places]
        if len(places) != 1 or not all(
            part is None or part is Ellipsis or type(part) in (int, slice) for part in others
        ):
            return None
        (place,) = places
        if any(type(part) is int for part in others):
            return None  # a number is an index too, and moves the dimensions
        single = _is_position(parts[place])
        self.replaced += 1
        if single:
            parts[place] = parts[place].reshape(1)
        else:
            start, length = self._bounds(parts[place])  # type: ignore[misc]
            size = tensor.shape[_dimension(parts, place, tensor.ndim)]
            start = torch.where(start < 0, size, start)  # no slice of that length begins before 0
            parts[place] = start + torch.arange(length, device=tensor.device)
        rest = tensor.ndim - sum(map(_selects, parts))
        after_rest = any(part is Ellipsis for part in parts[:place])
        return tuple(parts), place - 1 + rest if after_rest else place, single

    def _bounds(self, part: Any) -> tuple[torch.Tensor, Any] | None:
        """Position and length of `position:position + length`."""
        if type(part) is not slice or part.step not in (None, 1) or not _is_position(part.start):
            return None
        total, position, length = self._ends.get(id(part.stop), (None, None, 0))
        if position is None or position is not part.start or total is not part.stop:
            return None
        return position, length


def _is_position(value: Any) -> bool:
    whole = isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point()
    return whole and value.dtype != torch.bool and not value.is_complex()


def _selects(part: Any) -> bool:
    """Whether a part of an index stands for a dimension."""
    return part is not None and part is not Ellipsis


def _dimension(parts: list[Any], place: int, num_dims: int) -> int:
    """The dimension that the part at `place` stands for."""
    if any(part is Ellipsis for part in parts[:place]):
        return num_dims - 1 - sum(map(_selects, parts[place + 1 :]))
    return sum(map(_selects, parts[:place]))


def _num_dims(tensor: torch.Tensor, index: tuple[Any, ...]) -> int:
    """Dimensions of what the index selects: each part but None stands for one."""
    return tensor.ndim + sum(part is None for part in index)


def _with_axis(value: torch.Tensor, axis: int, num_dims: int) -> torch.Tensor:
    """`value`, which is written where one element is selected, with a dimension for that element."""
    after = num_dims - axis - 1
    return value.unsqueeze(value.ndim - after) if value.ndim >= after else value

"""Whether what a step would apply is finite.

A loss can be finite where its gradients are not: `tanh` hides an infinite input from the loss, and its slope, which is
zero there, times infinity is no number. So all that was summed is read once before it is applied.
"""

import math
from collections.abc import Iterable, Sequence

import torch

_NARROW = (torch.float16, torch.bfloat16)


def are_finite(values: Iterable[torch.Tensor]) -> bool:
    """Whether all numbers are finite. What shares memory, as the gradients in a bucket do, is read together."""
    held = [value.coalesce().values() if value.is_sparse else value for value in values]
    rooms = {(value.untyped_storage().data_ptr(), value.dtype): value for value in held if value.numel()}
    if all(math.isfinite(_sum_room(value)) for value in rooms.values()):
        return True
    return all(bool(torch.isfinite(value).all()) for value in held)  # a sum may overflow, or have what is not theirs


def have_finite_sums(rooms: Iterable[torch.Tensor]) -> bool:
    """Whether each tensor is dense and has a finite sum: then all its numbers are finite."""
    return all(not value.is_sparse and math.isfinite(_sum(value)) for value in rooms)


def _sum_room(value: torch.Tensor) -> float:
    """The sum of all memory that `value` lies in: what is not finite in it leaves no finite sum.

    It is read from the tensor at once: `torch.isfinite` of a single number takes a third as long as the sum of two
    million."""
    room = value
    if value.nbytes != value.untyped_storage().nbytes():
        room = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    return _sum(room)


def _sum(value: torch.Tensor) -> float:
    return abs((value.sum(dtype=torch.float32) if value.dtype in _NARROW else value.sum()).item())


def find_infinite(named: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """The first name whose tensor is not finite; empty: all are."""
    return next((name for name, value in named if value is not None and not are_finite([value])), "")


def describe_infinite(model: torch.nn.Module, gradients: Sequence[torch.Tensor | None]) -> str:
    """Which of the gradients of the trainable parameters, in their order, is not finite; empty: all are."""
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    found = find_infinite(zip(names, gradients, strict=True))
    return f"its gradient of {found} is not finite" if found else ""

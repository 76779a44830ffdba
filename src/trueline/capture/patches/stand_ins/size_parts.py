"""Parts and places of a tensor of a free size: nearly equal parts, those between sizes, the diagonal, rows and columns.

torch makes a constant of each size. Here parts are slices, the diagonal a view, and places are divided by the sizes.
Source: torch's documentation of `tensor_split`, `fill_diagonal_` and `unravel_index`.
"""

from collections.abc import Callable
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("a similarity without itself", "tensor_split into pools"),
)


def split_evenly(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor_split`: the first parts are longer by one where the size is no multiple of their number."""

    def split(input: torch.Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
        size: Any = input.shape[dim]
        at = indices_or_sections
        if isinstance(at, torch.Tensor) or not _is_free(size, *(at if isinstance(at, list | tuple) else (at,))):
            return original(input, at, dim)
        if isinstance(at, list | tuple):
            borders = [0, *at, size]
        elif not isinstance(at, int) or at < 1:
            return original(input, at, dim)
        else:
            least: Any = torch.sym_min  # typed for numbers
            borders = [number * (size // at) + least(number, size % at) for number in range(at + 1)]
        whole = (slice(None),) * (dim % input.ndim)
        return tuple(input[(*whole, slice(*borders[place : place + 2]))] for place in range(len(borders) - 1))

    return split


def fill_diagonal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`fill_diagonal_` of a matrix, which is as well a write into the view of its diagonal."""

    def fill(self: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
        if self.ndim != 2 or wrap:
            return original(self, fill_value, wrap)
        self.diagonal().fill_(fill_value)
        return self

    return fill


def unravel(original: Callable[..., Any]) -> Callable[..., Any]:
    """`unravel_index`: where in a tensor of this shape the element stands that is so far from its beginning."""

    def find(indices: torch.Tensor, shape: Any) -> Any:
        if not isinstance(shape, list | tuple) or not _is_free(*shape):
            return original(indices, shape)
        found, below = [], 1
        for size in reversed(shape):
            found.append(torch.remainder(torch.div(indices, below, rounding_mode="floor"), size))
            below = below * size
        return tuple(reversed(found))

    return find


def _is_free(*of: Any) -> bool:
    return any(isinstance(one, torch.SymInt) for one in of)

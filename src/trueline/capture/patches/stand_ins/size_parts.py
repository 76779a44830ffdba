"""Parts and places of a tensor of a free size: nearly equal parts, those between sizes, the diagonal, rows and columns,
pools over all of it (`F.max_pool1d(x, x.size(2))`).

torch makes a constant of each size. Here parts are slices, the diagonal a view, places are divided by the sizes, and a
pool is the largest number or the mean. Source: torch's documentation of `tensor_split`, `fill_diagonal_`,
`unravel_index`, `max_pool2d` and `avg_pool2d`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("a similarity without itself", "tensor_split into pools", "textcnn", "squeeze and excitation"),
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


def list_pools(max_pool1d: Callable[..., torch.Tensor]) -> Iterator[tuple[Any, str, Callable[..., torch.Tensor]]]:
    """Holder and name of each function that pools, and its stand-in; `max_pool1d` is for windows of a part."""
    largest, mean = ("dilation", "ceil_mode"), ("ceil_mode", "count_include_pad", "divisor_override")
    for rank, part in enumerate((max_pool1d, torch.max_pool2d, torch.max_pool3d), 1):
        yield torch, f"max_pool{rank}d", _pool_all(part, torch.amax, rank, largest)
        yield F, f"avg_pool{rank}d", _pool_all(getattr(F, f"avg_pool{rank}d"), torch.mean, rank, mean)


def _pool_all(original: Callable[..., Any], reduce: Callable[..., Any], rank: int, names: tuple[str, ...]) -> Any:
    """`original`, and `reduce` where the window is all of the tensor, or 1, in each of the last `rank` dimensions."""

    def pool(
        input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *more: Any, **kept: Any
    ) -> Any:
        sizes = _each(kernel_size, rank)
        given = dict(zip(names, more, strict=False)) | kept
        plain = {*_each(padding, rank)} == {0} and {*_each(given.get("dilation", 1), rank)} == {1}
        if _is_free(*sizes) and plain and given.get("divisor_override") is None:
            axes = _find_whole(input, sizes, _each(stride or sizes, rank))
            if axes is not None:
                return reduce(input, axes, keepdim=True)
        return original(input, kernel_size, stride, padding, *more, **kept)

    return pool


def _each(of: Any, rank: int) -> tuple[Any, ...]:
    """The number of each dimension."""
    given = tuple(of) if isinstance(of, list | tuple | torch.Size) else (of,)
    return given * rank if len(given) == 1 else given


def _find_whole(input: torch.Tensor, sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> list[int] | None:
    """The dimensions, from the end, that a window of `sizes` covers; None where it covers a part of one."""
    axes: list[int] = []
    for axis, size, stride in zip(range(-len(sizes), 0), sizes, strides, strict=True):
        if statically_known_true(size == input.shape[axis]):
            axes.append(axis)
        elif not (isinstance(size, int) and isinstance(stride, int) and size == stride == 1):
            return None
    return axes

"""In which order torch.einsum multiplies three operands or more, while a model is exported.

Where opt_einsum is installed (it comes with many libraries), torch asks it for the cheapest order, and it turns every
size into a number: the program then holds for the sizes of the example only. The order is one for all sizes; it is
asked for with the sizes of the example, as the eager model would be with them.
Source: torch.backends.opt_einsum; opt_einsum.contract_path(shapes=True).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import opt_einsum

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, with opt_einsum installed",
    cost="under 0.1 ms",
    helps=("linear_attention", "fnet"),
)

SOME = 8
"""Taken for a size that is known only when the program runs; it can make the order slower and changes no answer by more
than the order of a sum does."""


@contextmanager
def ordered_by_example() -> Iterator[None]:
    """While a model is traced in the block, sizes stay free in the search for an order."""
    library = opt_einsum.get_opt_einsum()
    if library is None:
        yield
        return
    before = opt_einsum.get_opt_einsum
    opt_einsum.get_opt_einsum = lambda: _Hinted(library)
    try:
        yield
    finally:
        opt_einsum.get_opt_einsum = before


class _Hinted:
    """opt_einsum that sees the sizes of the example."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def contract_path(self, equation: str, *operands: torch.Tensor, optimize: Any) -> Any:
        shapes = [tuple(_hint(size) for size in operand.shape) for operand in operands]
        return self._library.contract_path(equation, *shapes, optimize=optimize, shapes=True)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else SOME

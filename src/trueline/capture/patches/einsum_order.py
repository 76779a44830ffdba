"""torch.einsum of three operands or more makes numbers of their sizes while it looks for the cheapest order.

opt_einsum, where it is installed, calls `int` on every size. Here it gets the example's sizes as numbers; the order
holds for all sizes. Source: torch.backends.opt_einsum; opt_einsum.contract_path(shapes=True).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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

UNKNOWN = 8
"""Used for a size that is known only at run time. It may make the order slower, and changes no result by more than
the order of a sum does."""


@contextmanager
def order_by_example() -> Iterator[None]:
    """In the block, opt_einsum gets the example's sizes, and torch's stay free."""
    original = opt_einsum.get_opt_einsum
    library = original()
    if library is None:
        yield
        return

    def contract_path(equation: str, *operands: torch.Tensor, optimize: Any) -> Any:
        shapes = [tuple(map(_hint, operand.shape)) for operand in operands]
        return library.contract_path(equation, *shapes, optimize=optimize, shapes=True)

    opt_einsum.get_opt_einsum = lambda: SimpleNamespace(contract_path=contract_path)
    try:
        yield
    finally:
        opt_einsum.get_opt_einsum = original


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() and size.node.hint is not None else UNKNOWN

"""Rows by their positions, and the sums of rows that have one position: each is the other's gradient."""

from typing import Any, final

import torch

from trueline.ps.tables.numba_code import find_compiled
from trueline.ps.tables.unique import COMPILED_FROM


def take_positions(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`rows[positions]`: float32 (n, dim), int64 (m,) -> (m, dim). Values and gradients have the bits of
    `index_select`; where numba is installed, the gradients of many rows are summed in a third of the time."""
    if len(positions) < COMPILED_FROM or find_compiled("sum") is None or _is_transformed():
        return rows.index_select(0, positions)
    taken: torch.Tensor = _pick(rows, positions)
    return taken


def sum_positions(rows: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """float32 (m, dim), int64 (m,) -> (count, dim): of each position the sum of its rows, in their order."""
    total = torch.zeros(count, rows.shape[1], dtype=rows.dtype)
    add = find_compiled("sum") if len(positions) >= COMPILED_FROM and rows.dtype == torch.float32 else None
    if add is None:
        return total.index_add_(0, positions, rows)
    add(rows.detach().contiguous().numpy(), positions.numpy(), total.numpy())
    return total


def _is_transformed() -> bool:
    """Whether torch.func computes, which does not know the functions below."""
    return bool(torch._C._are_functorch_transforms_active())


@final
class _PickRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context.count = len(rows)
        context.save_for_backward(positions)
        context.save_for_forward(positions)
        return rows.index_select(0, positions)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (positions,) = context.saved_tensors
        return _sum(gradients[0], positions, context.count), None

    @staticmethod
    def jvp(context: Any, *tangents: torch.Tensor) -> torch.Tensor:
        (positions,) = context.saved_tensors
        return tangents[0].index_select(0, positions)


@final
class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        context.save_for_backward(positions)
        return sum_positions(rows, positions, count)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (positions,) = context.saved_tensors
        return _pick(gradients[0].contiguous(), positions), None, None


_pick: Any = _PickRows.apply
_sum: Any = _SumRows.apply

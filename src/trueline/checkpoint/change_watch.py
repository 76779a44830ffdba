"""Lets an optimizer's step begin while a snapshot is still read: each tensor is settled when an operator changes it.

A step of a large model takes as long as a disk needs for a good part of its state. torch's optimizers change one
parameter after the other, by operators whose schema says what they write to; before such an operator runs, the readers
get what it writes to, and the rest is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode


class ChangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `before_change` with the storage's address of each tensor that an operator is about to change."""

    def __init__(self, before_change: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before_change = before_change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in list_changed(func, args, kwargs):
            self._before_change(tensor.untyped_storage().data_ptr())
        return func(*args, **kwargs)


def list_changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that the operator `func` writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor) and one.is_cpu and one.layout == torch.strided:
                yield one


def changes_by_operators(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that a step changes is changed by operators: the optimizer is one of torch's own, or made of such,
    and no hook of a user's is called around the step. A class of a user's may write by other means."""
    parts = getattr(optimizer, "parts", (optimizer,))
    return all(type(part).__module__.startswith("torch.optim.") and not _has_hooks(part) for part in parts)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))

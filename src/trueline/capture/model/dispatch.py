"""What the modes that follow a model's operators have in common."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each operator to `handle`, those inside of structured control flow (`cond`, `while_loop`, `scan`) too.

    What torch still compiles (`map`, `associative_scan`) it compiles without the mode: under one that stays on, Dynamo
    marks torch's own frames as not to be compiled, for good, and each later call fails, with any values.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*tree_map(self._inside, tuple(args)), **(kwargs or {}))
        return self.handle(func, args, kwargs or {})

    def _inside(self, value: Any) -> Any:
        """A branch or body with this mode on; it is off while an operator is handled."""
        if not callable(value) or isinstance(value, torch.Tensor):
            return value

        def guard(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return guard

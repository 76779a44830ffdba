"""Values that are no numbers, given to a model with care: LAPACK may crash the process on them, or never end.

`torch.linalg.eigvals` of a matrix with a NaN ends the process with SIGSEGV (torch 2.13 with oneMKL, parameter 3 of
SGEBAL); `torch.mode` of numbers with a NaN among them never ends. A model that would hand such values on is stopped
before, as if it had raised by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LAPACK = ("linalg", "cholesky", "geqrf", "orgqr", "ormqr", "lu_", "svd", "qr", "triangular_solve", "lstsq")
_ENDLESS = ("mode.",)


class Careful(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ValueError where an operator that cannot bear it would get a value that is no number.

    Eager control flow (`torch.cond`, `while_loop`, `scan`) compiles itself. Under a mode that does not stand aside for
    that, Dynamo marks torch's own frames as not to be compiled, for good: each later call then fails, with any values.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*map(self._inside, args), **(kwargs or {}))
        name = str(func).removeprefix("aten.").lstrip("_")
        if name.startswith(_LAPACK + _ENDLESS):
            for value in tree_leaves((args, kwargs)):
                if _is_numbers(value) and not bool(value.isfinite().all()):
                    raise ValueError(f"{func} would get a value that is no number")
        return func(*args, **(kwargs or {}))

    def _inside(self, value: Any) -> Any:
        """A branch or body with this mode on; it is off while an operator is handled."""
        if not callable(value) or isinstance(value, torch.Tensor):
            return value

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return guarded


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())

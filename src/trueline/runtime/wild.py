"""Values that are no numbers, given to a model with care: LAPACK may crash the process on them.

`torch.linalg.eigvals` of a matrix with a NaN ends the process with SIGSEGV (torch 2.13 with oneMKL, parameter 3 of
SGEBAL). A model that would hand such a matrix on is stopped before, as if it had raised by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LAPACK = ("linalg", "cholesky", "geqrf", "orgqr", "ormqr", "lu_", "svd", "qr", "triangular_solve", "lstsq")


class Careful(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ValueError where an operator of linear algebra would get a value that is no number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").lstrip("_")
        if name.startswith(_LAPACK):
            for value in tree_leaves((args, kwargs)):
                if _is_numbers(value) and not bool(value.isfinite().all()):
                    raise ValueError(f"{func} would get a value that is no number")
        return func(*args, **(kwargs or {}))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())

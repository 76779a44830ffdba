"""Keeps values from operators that would crash on them.

`torch.linalg.eigvals` of a matrix with a NaN ends the process with SIGSEGV (torch 2.13 with oneMKL, parameter 3 of
SGEBAL), and `torch.mode` of numbers with a NaN never returns. `lcm` of the smallest whole number and 7 ends it with
SIGFPE. `repeat_interleave` and `ctc_loss` write where a count
that is too large, or a label that is none, leads them. A call that would pass such values on raises instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.proof.probes import Probe
from trueline.runtime.torch_export import compute_eigenvalues

_LAPACK = ("linalg", "cholesky", "geqrf", "orgqr", "ormqr", "lu_", "svd", "qr", "triangular_solve", "lstsq")
_ENDLESS = ("mode.",)
_TRUNCATED = ("div.Tensor_mode", "div.Scalar_mode", "div_.Tensor_mode", "div_.Scalar_mode")
"""Of the smallest whole number by -1 they end the process with SIGFPE (torch 2.13), if they truncate."""

CRASHING = ("linalg_eigvals",)
MOST_REPEATS = 2.0**40


class Unsafe(ValueError):
    """Stops an operator that would crash, or never return, on these values."""


class Careful(OperatorMode):  # type: ignore[no-untyped-call]
    """Raises Unsafe where an operator gets values on which it would crash or never return. `guarded`: how the names of
    those begin that get finite numbers only; `stopped`: one of them was, whatever a runtime makes of the error."""

    def __init__(self, guarded: tuple[str, ...] = _LAPACK + _ENDLESS) -> None:
        super().__init__()
        self._guarded, self.stopped = guarded, False

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func).removeprefix("aten.").lstrip("_")
        if name.startswith(self._guarded):
            for value in tree_leaves((args, kwargs)):
                floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
                if floats and not bool(value.isfinite().all()):
                    self.stopped = True
                    raise Unsafe(f"{func} would get a value that is no number")
        if name.startswith(_TRUNCATED) and kwargs.get("rounding_mode") == "trunc" and _overflows(*args[:2]):
            raise Unsafe(f"{func} would divide the smallest whole number by -1")
        if name.startswith("lcm") and any(_has_least(one) for one in args[:2]):
            raise Unsafe(f"{func} would divide the smallest whole number, by -1 perhaps")
        if name.startswith("repeat_interleave") and _counts_too_many(args):
            raise Unsafe(f"{func} would repeat more often than there is memory")
        if name.startswith("segment_reduce") and not _ends_inside(args[0], kwargs.get("offsets")):
            raise Unsafe(f"{func} would read beyond its data")
        if name.startswith("ctc_loss") and _has_no_label(*args[:2]):
            raise Unsafe(f"{func} would read a label that is none of its classes")
        return func(*args, **kwargs)


def _counts_too_many(args: Any) -> bool:
    """Whether the sum of the counts wraps around, or nearly does: int64 is what torch adds them in."""
    counts = args[0] if len(args) == 1 else args[1]
    return isinstance(counts, torch.Tensor) and float(counts.double().abs().sum()) > MOST_REPEATS


def _ends_inside(data: torch.Tensor, offsets: torch.Tensor | None) -> bool:
    return offsets is None or not offsets.numel() or 0 <= int(offsets.min()) <= int(offsets.max()) <= max(data.shape)


def _has_no_label(scores: torch.Tensor, labels: torch.Tensor) -> bool:
    return bool(labels.numel()) and not 0 <= int(labels.min()) <= int(labels.max()) < scores.shape[-1]


def _overflows(dividend: torch.Tensor, divisor: Any) -> bool:
    if dividend.is_floating_point() or dividend.is_complex():
        return False
    least = torch.iinfo(dividend.dtype if dividend.dtype != torch.bool else torch.uint8).min
    return least < 0 and bool(((dividend == least) & torch.as_tensor(divisor == -1)).any())


def _has_least(value: Any) -> bool:
    whole = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return whole and bool((value == torch.iinfo(value.dtype).min).any())


def care(probe: Probe) -> AbstractContextManager[object]:
    """Keeps values of `probe` that are not finite from LAPACK; and what a model makes of finite ones (0 / 0) from the
    operator that would crash."""
    return Careful() if probe.wild else _guarded_eigenvalues()


@contextmanager
def _guarded_eigenvalues() -> Iterator[None]:
    """Without a mode, under which torch takes other ways than without."""
    own, torch.linalg.eigvals = torch.linalg.eigvals, compute_eigenvalues
    try:
        yield
    finally:
        torch.linalg.eigvals = own

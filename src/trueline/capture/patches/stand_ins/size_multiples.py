"""A size that is filled up to a multiple is one: torch keeps `n + (4 - n % 4) % 4`, and divides it by 4 as it is.

So each view of it makes a guard of products of such sums, which hold for every size and which no reader of the guards
can see; windows of an image held for sizes that are multiples already. Here the sum is `4 * ((n + 3) // 4)`, of which
sympy knows what it divides by; `n - n % 4` is `4 * (n // 4)`. And what was filled up and cut off again is contiguous
where nothing was: `contiguous()` copies it without a question.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor, sym_node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="a look at the terms of each sum of sizes while tracing",
    helps=("swin with windows that are filled up", "attention in blocks"),
)


_SUMS: Any = sym_node
_TRACE: Any = proxy_tensor


@contextmanager
def keep_multiples() -> Iterator[None]:
    """In the block, sums of sizes that make a multiple are written as one."""
    adds, describes, contiguous = _SUMS._optimized_add, _TRACE._extract_tensor_metadata, torch.Tensor.contiguous

    def add(*args: Any, **options: Any) -> Any:
        is_summation, found = adds(*args, **options)
        folded = fold(found)
        return (is_summation, found) if folded is found else (False, folded)

    def describe(value: torch.Tensor) -> Any:
        return describes(value, include_contiguity=False)

    def copy(tensor: torch.Tensor, *of: Any, **options: Any) -> torch.Tensor:
        if of or options or tensor.layout is not torch.strided or not _may_be_contiguous(tensor):
            return contiguous(tensor, *of, **options)
        return tensor.clone(memory_format=torch.contiguous_format)

    with ExitStack() as stack:
        for holder, name, stand_in in (
            (_SUMS, "_optimized_add", add),
            (_TRACE, "_extract_tensor_metadata", describe),
            (torch.Tensor, "contiguous", copy),
        ):
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, stand_in)
        yield


def _may_be_contiguous(tensor: torch.Tensor) -> bool:
    """Whether sizes decide it, and no guard has yet."""
    shape, strides = tensor.shape, tensor.stride()
    if not any(isinstance(one, torch.SymInt) for one in (*shape, *strides)):
        return False
    asked, expected = False, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if statically_known_true(size == 1):
            continue
        if statically_known_true(stride != expected):
            return False
        asked |= not statically_known_true(stride == expected)
        expected = expected * size
    return asked


def fold(total: Any) -> Any:
    """`total`, or a sum that equals it for all whole numbers, where a rest in it makes a multiple of what stands
    beside it."""
    if not total.is_Add or not total.has(Mod, PythonMod):
        return total
    for term in total.args:
        factor, rest = term.as_coeff_Mul()
        if not isinstance(rest, Mod | PythonMod) or not rest.args[1].is_Integer or rest.args[1] < 2:
            continue
        padded = _find_padded(*rest.args)
        whole, sign = (rest.args[0], -1) if padded is None else (padded, 1)
        if not _has_terms(total - term, whole, sign * factor):
            continue
        by = rest.args[1]
        multiple = by * FloorDiv(whole + (0 if padded is None else by - 1), by)
        return fold(total - term - sign * factor * whole + sign * factor * multiple)
    return total


def _find_padded(value: Any, by: Any) -> Any:
    """The e of `(k * by - e % by) % by` or `(-e) % by`; None for others."""
    for term in value.args if value.is_Add else (value,):
        factor, rest = term.as_coeff_Mul()
        left = value - term
        if factor == -1 and isinstance(rest, Mod | PythonMod) and rest.args[1] == by and (left / by).is_integer:
            return rest.args[0]
    negated = value.is_Mul and value.as_coeff_Mul()[0] == -1
    return -value if negated else None


def _has_terms(total: Any, part: Any, factor: Any) -> bool:
    """Whether all terms of `part` but its number are in `total`, `factor` times."""
    found = total.as_coefficients_dict()
    terms = {term: times for term, times in part.as_coefficients_dict().items() if not term.is_number}
    return bool(terms) and all(found.get(term, 0) == factor * times for term, times in terms.items())

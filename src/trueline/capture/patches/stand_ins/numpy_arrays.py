"""Arrays that numpy makes of an input or of a size stay tensors in a trace.

numpy computes outside of torch: it refuses a traced tensor, and makes a constant of a size. So the user's modules get a
`numpy` of their own while the model is traced (`size_lengths`), whose functions compute with tensors where a size, a
tensor or such an array is among their arguments; with other arguments they are numpy's. Whatever torch has no
counterpart of raises, as before. Source: torch._numpy, numpy's interface on tensors, with its dtypes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch._numpy as tensors
from torch._numpy import _dtypes
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from trueline.capture.model.code_paths import SourceLine, current_line
from trueline.capture.patches import Patch
from trueline.capture.patches.stand_ins import size_functions, size_numbers
from trueline.capture.patches.stand_ins.size_lists import SizeList

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export", helps=("np.arange(x.shape[1])", "x.numpy()")
)

ARRAY: Any = vars(tensors)["ndarray"]
_SIZES = (torch.SymInt, torch.SymFloat)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


FOLLOWED: set[SourceLine] = set()
"""The user's lines that made arrays of traced tensors since the stand-ins are in place."""


def _note_line() -> None:
    place = current_line()
    if place is not None:
        FOLLOWED.add(place)


class FreeNumpy:
    """The module numpy, or a part of it, as the user's modules see it."""

    def __init__(self, plain: ModuleType, free: ModuleType | None) -> None:
        self._plain, self._free = plain, free

    def __getattr__(self, name: str) -> Any:
        plain, free = getattr(self._plain, name), getattr(self._free, name, None)
        if isinstance(plain, ModuleType):
            return FreeNumpy(plain, free if name != "random" else None)
        if plain is np.ndarray:
            return _Array
        free = _OWN.get(name, free) if self._plain is np else free
        if isinstance(plain, type) or not callable(plain) or not callable(free):
            return plain
        return _Function(plain, _OF_SIZES.get(name), free)


class _AnyArray(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, np.ndarray | ARRAY)


class _Array(metaclass=_AnyArray):
    """`numpy.ndarray` as the user's modules see it."""


class _Function:
    """A function of numpy: of what is traced, its counterpart for tensors."""

    def __init__(
        self, plain: Callable[..., Any], of_sizes: Callable[..., Any] | None, free: Callable[..., Any]
    ) -> None:
        self._plain, self._of_sizes, self._free = plain, of_sizes, free

    def __call__(self, *args: Any, **options: Any) -> Any:
        leaves = tree_leaves((args, options))
        if not any(map(_is_traced, leaves)):
            return self._plain(*args, **options)
        _note_line()
        numbers = all(size_numbers.is_number(one) or _are_numbers([one]) for one in leaves)
        if self._of_sizes is not None and not options and numbers:
            return self._of_sizes(*args)
        found = self._free(*tree_map(_as_tensor, args), **tree_map(_as_tensor, options))
        numbers = _are_numbers(leaves) and isinstance(found, ARRAY) and not found.ndim
        of_tensor = isinstance(self._plain, np.ufunc) and any(isinstance(one, torch.Tensor) for one in args)
        return found.tensor if numbers or of_tensor else found  # numpy returns a number, and a tensor of a tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _is_traced(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) not in _PLAIN
    return isinstance(value, (*_SIZES, torch.SymBool, ARRAY, SizeList))


def _are_numbers(leaves: Iterable[Any]) -> bool:
    return all(isinstance(one, int | float | torch.SymInt | torch.SymFloat) for one in leaves)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, SizeList):
        return leaf.tensor()
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def space_evenly(start: Any, stop: Any, num: Any = 50, endpoint: bool = True, *, dtype: Any = None) -> Any:
    """`numpy.linspace` of numbers; torch's would fix the number of steps."""
    first, last = (one.tensor if isinstance(one, ARRAY) else one for one in (start, stop))
    steps: Any = torch.sym_max(num - 1, 1) if endpoint else num  # type: ignore[no-untyped-call]
    step = torch.full((), last - first, dtype=torch.float64) / steps
    found = ARRAY(torch.arange(num, dtype=torch.float64) * step + first)
    return found if dtype is None else found.astype(dtype)


def join_rows(of: Any, dtype: Any = None, **options: Any) -> Any:
    """`numpy.array` of a list of arrays, which torch._numpy takes numbers out of."""
    rows = isinstance(of, list | tuple) and len(of) > 0 and all(isinstance(one, ARRAY) and one.ndim for one in of)
    if not rows or options:
        return vars(tensors)["array"](of, dtype, **options)
    found = vars(tensors)["stack"](of)
    return found if dtype is None else found.astype(dtype)


_OWN: dict[str, Callable[..., Any]] = {"linspace": space_evenly, "array": join_rows}
"""In place of torch._numpy's."""


def _product(of: Any) -> Any:
    return functools.reduce(operator.mul, of) if isinstance(of, tuple | list) else of


_OF_SIZES: dict[str, Callable[..., Any]] = {
    **size_functions.OF_NUMBERS,
    "power": operator.pow,
    "sqrt": size_functions.sqrt,
    "ceil": lambda of: torch.sym_float(size_functions.ceil(of)),  # type: ignore[no-untyped-call]
    "floor": lambda of: torch.sym_float(size_functions.floor(of)),  # type: ignore[no-untyped-call]
    "prod": _product,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
}
"""Of sizes alone: their results may be sizes again."""


def read_dtype(of: Any) -> Any:
    """A dtype of torch._numpy, also of one of numpy's."""
    own = isinstance(of, np.dtype) or (isinstance(of, type) and issubclass(of, np.generic))
    return _own_dtype(np.dtype(of).name if own else of)  # type: ignore[no-untyped-call]


_own_dtype = _dtypes.dtype
INSTEAD: tuple[tuple[Any, Any], ...] = ((np, FreeNumpy(np, tensors)),)
"""What a user's module imports, and what it has while the model is traced."""
NAMES = frozenset({"np", "numpy"})


@contextmanager
def keep_tensors() -> Iterator[None]:
    """In the block, tensors become arrays of tensors, and these tensors again."""
    with ExitStack() as stack:
        FOLLOWED.clear()
        stack.callback(FOLLOWED.clear)

        def replace(holder: Any, name: str, stand_in: Any) -> None:
            if name in vars(holder):
                stack.callback(setattr, holder, name, vars(holder)[name])
            else:
                stack.callback(delattr, holder, name)
            setattr(holder, name, stand_in)

        replace(torch.Tensor, "numpy", _make_array(torch.Tensor.numpy))
        replace(ARRAY, "__array_ufunc__", None)  # numpy's own arrays leave operators to these
        replace(_dtypes, "dtype", read_dtype)
        replace(torch, "from_numpy", _take_arrays(torch.from_numpy))
        for name, dtype in _CONSTRUCTORS.items():
            original = getattr(torch, name)
            replace(torch, name, _Constructor(name, (), {"plain": original, "kind": dtype}))
        yield


_CONSTRUCTORS = {"LongTensor": torch.int64, "FloatTensor": torch.float32, "DoubleTensor": torch.float64}


class _Constructor(type):
    """`torch.LongTensor` and its like, also of an array or list of a free size."""

    plain: Any
    kind: torch.dtype

    def __call__(cls, *given: Any, **options: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], ARRAY | SizeList):
            own = given[0]
            found = own.tensor() if isinstance(own, SizeList) else own.tensor
            if found.dtype is cls.kind:
                return found
        return cls.plain(*given, **options)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)


def _make_array(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(tensor: torch.Tensor, **options: Any) -> Any:
        if not _is_traced(tensor):
            return original(tensor, **options)
        _note_line()
        return ARRAY(tensor.detach())

    return make


def _take_arrays(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(array: Any) -> torch.Tensor:
        found: torch.Tensor = array.tensor if isinstance(array, ARRAY) else original(array)
        return found

    return make


class TensorsOfArrays(TorchFunctionMode):
    """`torch.tensor` and `torch.as_tensor` of such an array."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], ARRAY):
            given = {name: one for name, one in kwargs.items() if name in ("dtype", "device") and one is not None}
            found = args[0].tensor.clone() if func is torch.tensor else args[0].tensor
            return found.to(**given) if given else found
        return func(*args, **kwargs)


def is_cause(message: str) -> bool:
    """Whether torch's `message` says that a tensor of a trace cannot be an array."""
    return any(word in message for word in ("numpy", "np.ndarray", "ufunc", "__array__"))

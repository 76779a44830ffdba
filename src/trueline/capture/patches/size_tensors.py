"""A size that goes through a tensor and back (`torch.div(length, 4, rounding_mode="trunc")`) stays a size while traced.

torch.export takes a number out of any tensor for one that the values choose, and cannot compare it with a size. Here
tensors of no dimension that are made of sizes alone are known with the whole number that they hold: arithmetic on them
goes on with it, and where Python, a shape or an index asks for the number, it is the size that is given. What a write
has reached is not known any more. Rounding that goes another way below zero (`trunc`) is followed only where nothing is
below zero. Source: the documentation of torch.div and of torch.Tensor.item.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import users_functions
from trueline.capture.patches.mode_scope import within

Size = Any
"""An int, a torch.SymInt or, of a comparison, a torch.SymBool."""

_MAKERS = frozenset({"tensor", "as_tensor", "scalar_tensor"})
_NUMBERS = frozenset({"item", "__int__", "__index__", "__bool__", "tolist"})
_OF_TENSORS = frozenset(
    {"stack", "cat", "concat", "concatenate", "hstack", "vstack", "dstack", "einsum", "meshgrid", "block_diag"}
    | {"broadcast_tensors", "cartesian_prod", "atleast_1d", "tensor", "as_tensor"}
)
"""Where a list among the arguments is one of tensors, or becomes one, and not a shape."""
_SHAPED = frozenset(
    {"view", "reshape", "expand", "repeat", "tile", "narrow", "unfold", "unflatten", "select", "split", "chunk", "roll"}
    | {"zeros", "ones", "empty", "full", "rand", "randn", "arange", "new_zeros", "new_ones", "new_empty", "new_full"}
    | {"topk"}
)
"""Where a number may stand that says how many, or which."""
_ROUNDED = frozenset({"div", "divide", "floor_divide", "remainder"})
"""What users call with sizes, and get a tensor of."""


def _floored(a: Size, b: Size) -> Size | None:
    return a // b if statically_known_true(b > 0) else None


def _remainder(a: Size, b: Size) -> Size | None:
    return a % b if statically_known_true(b > 0) else None


def _divided(a: Size, b: Size, *, rounding_mode: str | None = None) -> Size | None:
    above = rounding_mode == "floor" or (rounding_mode == "trunc" and statically_known_true(a >= 0))
    return _floored(a, b) if above else None


def _swapped(function: Callable[[Size, Size], Size | None]) -> Callable[[Size, Size], Size | None]:
    return lambda a, b: function(b, a)


_ARITHMETIC: Mapping[str, Callable[..., Size | None]] = {
    "add": operator.add,
    "sub": operator.sub,
    "subtract": operator.sub,
    "rsub": _swapped(operator.sub),
    "mul": operator.mul,
    "multiply": operator.mul,
    "neg": operator.neg,
    "negative": operator.neg,
    "floor_divide": _floored,
    "floordiv": _floored,
    "rfloordiv": _swapped(_floored),
    "remainder": _remainder,
    "mod": _remainder,
    "div": _divided,
    "divide": _divided,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
    "long": lambda a: a,
    "clone": lambda a: a,
    "detach": lambda a: a,
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}


class SizeTensors(TorchFunctionMode):
    """While a model is traced in the block, what it puts of sizes into tensors of no dimension comes back as sizes."""

    def __init__(self) -> None:
        super().__init__()
        self._held = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        known = [leaf for leaf in _leaves((args, kwargs)) if self._size(leaf) is not None]
        if known and name in _NUMBERS:
            size = self._size(args[0])
            return bool(size) if name == "__bool__" else size
        if known and name.strip("_") not in _ARITHMETIC:
            args, kwargs = self._returned(name.strip("_"), args, kwargs)
        found = func(*args, **kwargs)
        if isinstance(found, torch.Tensor) and not found.ndim and found.dtype in (torch.int64, torch.bool):
            size = self._computed(name, args, kwargs)
            if size is not None:
                self._held[found] = (size, found._version)
        return found

    def _size(self, leaf: Any) -> Size | None:
        """The size that a tensor holds; None where that is not known, or was written over."""
        if not isinstance(leaf, torch.Tensor) or leaf.ndim or leaf not in self._held:
            return None
        size, version = self._held[leaf]
        return size if version == leaf._version else None

    def _computed(self, name: str, args: Any, kwargs: Any) -> Size | None:
        """What the call makes of sizes alone; None where anything else takes part."""
        plain = name.strip("_")
        function = (lambda a, **_: a) if plain in _MAKERS else _ARITHMETIC.get(plain)
        if function is None or (name.endswith("_") and not name.startswith("_")):
            return None
        sizes = [one if _is_size(one) else self._size(one) for one in args]
        free = any(isinstance(size, torch.SymInt | torch.SymBool) for size in sizes)
        if not free or any(size is None for size in sizes):
            return None
        try:
            return function(*sizes, **kwargs)
        except TypeError:  # an argument that the function of numbers does not have
            return None

    def _returned(self, name: str, args: Any, kwargs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments with sizes in place of their tensors where a shape or an index is asked for."""

        def size(one: Any, *, inside: bool) -> Any:
            if isinstance(one, slice):
                return slice(*(size(end, inside=True) for end in (one.start, one.stop, one.step)))
            if type(one) in (list, tuple, torch.Size):
                return type(one)(size(part, inside=True) for part in one) if name not in _OF_TENSORS else one
            held = self._size(one) if inside or name in _SHAPED else None
            return one if held is None else held

        return [size(one, inside=False) for one in args], {key: size(one, inside=False) for key, one in kwargs.items()}


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _is_size(one: Any) -> bool:
    return isinstance(one, int | torch.SymInt) and not isinstance(one, bool)


def _leaves(given: Any) -> list[Any]:
    leaves = tree_leaves(given)
    return [
        end for leaf in leaves for end in ((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
    ]


def may_help(module: torch.nn.Module, said: str) -> bool:
    """Whether torch.export failed, with the message `said`, over a number out of a tensor, in code that may make
    tensors of sizes: in a method, or in a function that a method names."""
    return "data-dependent" in said and any(
        not (_MAKERS | _ROUNDED).isdisjoint(code.co_names)
        for function in users_functions(module)
        for code in (function.__code__, *_named(function))
    )


def _named(function: FunctionType) -> Iterator[CodeType]:
    for name in function.__code__.co_names:
        one = function.__globals__.get(name)
        if isinstance(one, FunctionType) and code_paths.is_users(one.__code__.co_filename):
            yield one.__code__


@contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """While `module` is traced in the block, what it puts of sizes into tensors comes back as sizes."""
    with within(module, SizeTensors()):
        yield

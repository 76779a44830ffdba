"""Values that follow from sizes alone are computed while a model is traced, as Python computes them.

A mask of ones that the model makes itself, and all that is counted in it, are the same at every call once the sizes
are. torch.export traces them all the same, and stops where Python wants one of them as a number. Here they stay plain
tensors, outside the trace, and enter it as constants where they meet what was traced. What is drawn at random is
traced, and so is whatever has a size that is still free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_MAKERS = frozenset(
    {torch.ones, torch.zeros, torch.full, torch.arange, torch.eye, torch.linspace, torch.tensor, torch.as_tensor}
)
_OF_TENSORS = frozenset({torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack})
"""Where a list among the arguments is one of tensors, not of numbers."""
_FREE = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Drawn(Exception):
    """Random numbers would be drawn, which are others at each call."""


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises Drawn where random numbers would be drawn in the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Drawn
        return func(*args, **(kwargs or {}))


class Known(TorchFunctionMode):
    """While a model is traced in the block, what its code makes of sizes that are numbers has a value."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if tensor in self._known]
        free = any(isinstance(leaf, _FREE) for leaf in leaves)
        if not free and len(known) == len(tensors) and (known or func in _MAKERS):
            try:
                return self._computed(func, args, kwargs)
            except Drawn:
                pass
        if not known:
            return func(*args, **kwargs)
        if writes(func, kwargs) and args[0] in self._known:
            raise NotImplementedError(f"{_name(func)} writes a traced value into a tensor that was known")
        return func(*self._entered(func, args), **{name: self._number(value) for name, value in kwargs.items()})

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), NoDraws():  # type: ignore[no-untyped-call]
            found = func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._known[leaf] = True
        return found

    def _entered(self, func: Any, args: Any) -> list[Any]:
        """The arguments for the trace: whole numbers beside the first as numbers, other known values as constants."""
        return [
            self._constants(one) if at == 0 or (at == 1 and func in _OF_TENSORS) else self._number(one)
            for at, one in enumerate(args)
        ]

    def _number(self, value: Any) -> Any:
        def number(leaf: Any) -> Any:
            whole = isinstance(leaf, torch.Tensor) and leaf in self._known and not leaf.ndim and not _is_float(leaf)
            return self._computed(torch.Tensor.item, (leaf,), {}) if whole else self._constants(leaf)

        return tree_map(number, value)

    def _constants(self, value: Any) -> Any:
        def constant(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf in self._known:
                return torch.ops.aten.lift_fresh_copy.default(leaf)
            return leaf

        return tree_map(constant, value)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def writes(func: Any, kwargs: Any) -> bool:
    """Whether a function of torch writes into its first argument, or `out`."""
    name = _name(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None

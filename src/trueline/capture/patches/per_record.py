"""A model whose code goes through the batch record by record, as a program for any batch.

`for row in x` and lists with one entry for each record make a constant of the batch. Such a model is traced for a
single record, where there is nothing to go through, and the program asks that for one record after the other, as the
model does. That records do not look at each other is taken for granted here and left to the proof, which asks batches
of many sizes. Source: torch's documentation of torch._higher_order_ops.map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.patches import Patch
from trueline.errors import CaptureError

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="a second export, after the first one failed; the program answers record by record",
    helps=("vilt", "RaggedMeans"),
)

_MAP = torch.ops.higher_order.map_impl


class Single(torch.nn.Module):
    """`flat` for a batch of one, with what follows from the sizes computed once."""

    def __init__(self, flat: torch.nn.Module) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with Known():
            found: tuple[torch.Tensor, ...] = self.flat(*tensors)
        return found


class Records(torch.nn.Module):
    """The functional program `single`, which takes and gives tensors of one record, asked for each record of a batch.

    Raises CaptureError for a program that writes its buffers, or gives what has no row for its record.
    """

    def __init__(self, single: torch.export.ExportedProgram) -> None:
        super().__init__()
        signature = single.graph_signature
        values = {node.name: node.meta.get("val") for node in single.graph.nodes}
        answers = [values.get(str(name)) for name in signature.user_outputs]
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError("the model writes into its own buffers or inputs when it is called")
        if not all(isinstance(one, torch.Tensor) and one.ndim and one.shape[0] == 1 for one in answers):
            raise CaptureError("the model gives something that has no row for each record")
        self._order: list[str | None] = []
        """Of what `single` takes: the weight's name here, or None for an input."""
        for spec in signature.input_specs:
            self._order.append(None if spec.kind is InputKind.USER_INPUT else self._kept(single, spec))
        # in a tuple it is no part of this module: its weights are
        self._held: tuple[GraphModule] = (single.graph_module,)

    @property
    def program(self) -> GraphModule:
        """What one record is asked."""
        return self._held[0]

    def _kept(self, single: torch.export.ExportedProgram, spec: torch.export.graph_signature.InputSpec) -> str:
        target = str(spec.target)
        tensor = single.state_dict[target] if target in single.state_dict else single.constants[target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the model holds a {type(tensor).__name__} that no program of records can be given")
        name = target.replace(".", "_")
        if spec.kind is InputKind.PARAMETER:
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)
        return name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [getattr(self, name) for name in self._order if name is not None]

        def one(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs, rest = iter(given[: len(tensors)]), iter(given[len(tensors) :])
            found: tuple[torch.Tensor, ...] = self.program(
                *(next(inputs if name is None else rest) for name in self._order)
            )
            return found

        rows = _MAP(one, [tensor.unsqueeze(1) for tensor in tensors], weights)
        return tuple(row.squeeze(1) for row in rows)


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

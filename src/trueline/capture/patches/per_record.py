"""A model whose code loops over the records of a batch, as a program for any batch.

`for row in x` makes a constant of the batch. Such a model is traced for a single record, and the program maps the trace
over the batch (torch._higher_order_ops.map); the proof shows whether records depend on each other. What the model
counts in tensors of its own making (a mask of ones) follows from sizes alone: in the trace these are plain tensors,
which enter it as constants where they meet traced ones.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.patches import Patch
from trueline.errors import CaptureError, name_type

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export; no batches", helps=("vilt", "RaggedMeans")
)

_MAP = torch.ops.higher_order.map_impl
_MAKERS = frozenset(
    {torch.ones, torch.zeros, torch.full, torch.arange, torch.eye, torch.linspace, torch.tensor, torch.as_tensor}
)
_OF_TENSORS = frozenset({torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack})
"""Functions whose list argument holds tensors, not numbers."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SingleRecord(torch.nn.Module):
    """`flat` for a batch of one; what follows from the sizes is computed once."""

    def __init__(self, flat: torch.nn.Module) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with KnownValues():
            outputs: tuple[torch.Tensor, ...] = self.flat(*tensors)
        return outputs


class MappedRecords(torch.nn.Module):
    """The functional program `single` of one record, mapped over the records of a batch. `decided`: those of its guards
    that are conditions of the user's code.

    Raises CaptureError for a program that writes its buffers, or has an output without a row for its record.
    """

    def __init__(self, single: torch.export.ExportedProgram, decided: Collection[str]) -> None:
        super().__init__()
        signature = single.graph_signature
        values = {node.name: node.meta.get("val") for node in single.graph.nodes}
        outputs = [values.get(str(name)) for name in signature.user_outputs]
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError("the model writes into its own buffers or inputs when it is called")
        if not all(isinstance(one, torch.Tensor) and one.ndim and one.shape[0] == 1 for one in outputs):
            raise CaptureError("the model has an output without a row for each record")
        self._order = [
            None if spec.kind is InputKind.USER_INPUT else self._register(single, spec)
            for spec in signature.input_specs
        ]
        """Of the arguments of `single`: the weight's name here, or None for an input."""
        codes = getattr(single, "_guards_code", [])
        self.guards = {code: code in decided for code in codes if ".size()[0]" not in code}
        """Of `single`, on sizes other than the batch, and whether the user's code decides by each."""
        self.program = (single.graph_module,)
        """Of one record; in a tuple, because its weights are registered here already."""

    def _register(self, single: torch.export.ExportedProgram, spec: torch.export.graph_signature.InputSpec) -> str:
        target = str(spec.target)
        tensor = single.state_dict[target] if target in single.state_dict else single.constants[target]
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the model holds {name_type(tensor)}, which no program of records can take")
        name = target.replace(".", "_")
        if spec.kind is InputKind.PARAMETER:
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)
        return name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [getattr(self, name) for name in self._order if name is not None]

        def run_one(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs, rest = iter(given[: len(tensors)]), iter(given[len(tensors) :])
            outputs: tuple[torch.Tensor, ...] = self.program[0](
                *(next(inputs if name is None else rest) for name in self._order)
            )
            return outputs

        rows = _MAP(run_one, [tensor.unsqueeze(1) for tensor in tensors], weights)
        return tuple(row.squeeze(1) for row in rows)


class RandomNumbers(Exception):
    """Random numbers would be drawn, which differ at each call."""


class NoRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RandomNumbers where random numbers would be drawn in the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomNumbers
        return func(*args, **(kwargs or {}))


class KnownValues(TorchFunctionMode):
    """While a model is traced in the block, what its code makes of sizes that are numbers has a value."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if tensor in self._known]
        symbolic = any(isinstance(leaf, SYMBOLIC) for leaf in leaves)
        if not symbolic and len(known) == len(tensors) and (known or func in _MAKERS):
            try:
                return self._compute(func, args, kwargs)
            except RandomNumbers:
                pass
        if not known:
            return func(*args, **kwargs)
        if writes(func, kwargs) and args[0] in self._known:
            raise NotImplementedError(f"{_name(func)} writes a traced value into a tensor that was known")
        # whole numbers enter the trace as numbers, other known values as constants
        entered = [
            tree_map(self._as_constant if at == 0 or (at == 1 and func in _OF_TENSORS) else self._as_number, value)
            for at, value in enumerate(args)
        ]
        return func(*entered, **{name: tree_map(self._as_number, value) for name, value in kwargs.items()})

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), NoRandom():  # type: ignore[no-untyped-call]
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._known[leaf] = True
        return result

    def _as_number(self, leaf: Any) -> Any:
        number = isinstance(leaf, torch.Tensor) and leaf in self._known and not leaf.ndim
        if number and not leaf.is_floating_point() and not leaf.is_complex():
            return self._compute(torch.Tensor.item, (leaf,), {})
        return self._as_constant(leaf)

    def _as_constant(self, leaf: Any) -> Any:
        known = isinstance(leaf, torch.Tensor) and leaf in self._known
        return torch.ops.aten.lift_fresh_copy.default(leaf) if known else leaf


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def writes(func: Any, kwargs: Any) -> bool:
    """Whether a function of torch writes into its first argument, or `out`."""
    name = _name(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None

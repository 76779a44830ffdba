"""How a model is called: its nested inputs and outputs as flat, named tensors, and back.

A Session speaks in names, a module in tuples, dicts and keyword arguments. The names come from the
module's own `forward` and from the keys and fields on the way to each tensor: `x`, `mask`, `images.0`,
`boxes.left`. What is not a tensor (None, a flag, a number) is part of the call and stays as the example
has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from trueline.bundle.signature import DATATYPES, Dim, Signature, TensorSpec
from trueline.errors import CaptureError

BATCH = "batch"
"""The symbol of the dimension that counts records: the first of every input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """One module's calling convention, learnt from one example.

    `signature` is what was seen, not what is proven.
    """

    signature: Signature
    example: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    """Leaves of (args, kwargs);

    where a tensor belongs stands its position among the inputs, wrapped in a Slot.
    """
    spec: Any
    """torch's TreeSpec of (args, kwargs)."""

    def call(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Calls `module` with `tensors` in their places; returns the tensors of its outputs in order."""
        args, kwargs = self.arguments(tensors)
        found = module(*args, **kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module, with `tensors` in their places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of input number `index`."""

    index: int


class Flat(torch.nn.Module):
    """`module` with flat tensors in and out: the form that every exporter is given."""

    def __init__(self, module: torch.nn.Module, calling: Calling) -> None:
        super().__init__()
        self.module = module
        self.calling = calling

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.calling.call(self.module, tensors)


def learn(module: torch.nn.Module, inputs: Any) -> Calling:
    """Learns the calling convention of `module` by calling it once with `inputs`, a small batch.

    `inputs` is a tensor, a tuple or list of them (positional arguments) or a dict (keyword arguments).
    Raises CaptureError when an input or output is nothing that a bundle can hold, or the call fails.
    """
    args, kwargs = _arguments(inputs)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    names = _input_names(module, [path for path, _ in paths])
    tensors: list[torch.Tensor] = []
    leaves: list[Any] = []
    specs: list[TensorSpec] = []
    for (_, leaf), name in zip(paths, names, strict=True):
        if isinstance(leaf, torch.Tensor):
            leaves.append(Slot(len(tensors)))
            tensors.append(leaf.detach())
            specs.append(_spec("input", name, leaf, None))
        else:
            leaves.append(leaf)
    num_records = _num_records(specs, tensors)
    specs = [TensorSpec(name=s.name, datatype=s.datatype, shape=(BATCH, *s.shape[1:])) for s in specs]
    outputs = _outputs(_called(module, args, kwargs), {s.name for s in specs}, num_records)
    signature = Signature(inputs=tuple(specs), outputs=outputs, dims={BATCH: Dim()})
    return Calling(signature=signature, example=tuple(tensors), leaves=tuple(leaves), spec=spec)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def _called(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be called with its own example: {type(error).__name__}: {error}",
            hint="forward is called with what examples() returns, or the inputs of the records",
        ) from error


def _input_names(module: torch.nn.Module, paths: Sequence[Sequence[Any]]) -> list[str]:
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "input")
    names = []
    for path in paths:
        first, *deeper = [_step(step) for step in path[1:]]
        if _step(path[0]) == "0":
            index = int(first)
            first = positional[index].name if index < len(positional) else f"{rest}.{index - len(positional)}"
        names.append(".".join([first, *deeper]))
    return _unique(names, set())


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _unique(names: Iterable[str], taken: set[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "value"
        count, free = 2, plain
        while free in taken:
            free, count = f"{plain}_{count}", count + 1
        taken.add(free)
        found.append(free)
    return found


def _outputs(found: Any, taken: set[str], num_records: int) -> tuple[TensorSpec, ...]:
    paths = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(found)[0] if leaf is not None]
    named = []
    for path, leaf in paths:
        steps = [_step(step) for step in path]
        if not steps or steps[0].isdigit():
            steps = ["output" if not steps else f"output_{steps[0]}", *steps[1:]]
        named.append((".".join(steps), leaf))
    if not named:
        raise CaptureError("the model returns no tensor; forward has to return a tensor, a tuple or a dict of them")
    names = _unique((name for name, _ in named), taken)
    return tuple(_spec("output", name, leaf, num_records) for name, (_, leaf) in zip(names, named, strict=True))


def _spec(role: str, name: str, leaf: Any, num_records: int | None) -> TensorSpec:
    if not isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"{role} '{name}' of the model is a {type(leaf).__name__}, not a tensor",
            hint="return tensors, or tuples and dicts of them",
        )
    try:
        datatype = DATATYPES[torch.empty(0, dtype=leaf.dtype).numpy().dtype]
    except (TypeError, KeyError) as error:
        raise CaptureError(
            f"{role} '{name}' has dtype {leaf.dtype}, which no bundle can carry",
            hint="convert it inside the model, e.g. with .float()",
        ) from error
    shape: tuple[int | str, ...] = tuple(leaf.shape)
    if num_records is not None and shape and shape[0] == num_records:
        shape = (BATCH, *shape[1:])
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def _num_records(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> int:
    if not specs:
        raise CaptureError("the example holds no tensor; give the model at least one")
    counts = {spec.name: tensor.shape[0] if tensor.ndim else None for spec, tensor in zip(specs, tensors, strict=True)}
    num = next(iter(counts.values()))
    if num is None or num < 1 or any(count != num for count in counts.values()):
        listing = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise CaptureError(
            f"the inputs do not count the same records in their first dimension ({listing})",
            hint="the first dimension of every input is the batch",
        )
    return num

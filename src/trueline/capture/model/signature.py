"""How a model is called: its nested inputs and outputs as flat, named tensors, and back.

A Session uses names, a module tuples, dicts and keyword arguments. The names come from the module's own `forward` and
from the keys and fields on the way to each tensor: `x`, `mask`, `images.0`, `boxes.left`. What is not a tensor (None, a
flag, a number) is part of the call and stays as in the example.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from trueline.bundle.signature import DATATYPES, Dim, Signature, TensorSpec
from trueline.capture.model import code_paths, dynamic_dims
from trueline.capture.model.arguments import as_arguments
from trueline.capture.model.dynamic_dims import BATCH as BATCH
from trueline.capture.model.dynamic_dims import Free, Place
from trueline.capture.model.explicit_state import GIVEN, NEXT, Explicit, preserve_buffers, users_own
from trueline.capture.model.output_places import OutputPlaces, name_output, name_step
from trueline.errors import CaptureError, name_type
from trueline.recipe.eager_mode import as_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """One module's calling convention, learnt from examples."""

    signature: Signature
    """From the examples, not proven: every free dimension but the batch is a symbol of its own."""
    presumed: Signature
    """The same, with those dimensions as one symbol that are equal in all examples."""
    example: tuple[torch.Tensor, ...]
    free: Free
    leaves: tuple[Any, ...]
    """Leaves of (args, kwargs), with a Slot in place of each tensor."""
    spec: Any
    """torch's TreeSpec of (args, kwargs)."""
    batches: tuple[tuple[torch.Tensor, ...], ...]
    """The tensors of every example; `example` is one of them."""
    outputs: OutputPlaces

    def call(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Calls `module` with `tensors` in their places; returns the tensors of its outputs in order. Raises
        CaptureError where these are others than those of its example."""
        args, kwargs = self.arguments(tensors)
        return self.outputs.take(module(*args, **kwargs))

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module, with `tensors` in their places."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def find_alike(self, inputs: Sequence[TensorSpec]) -> dict[str, str]:
        """Each symbol of `inputs` with the first one that has its size in all examples."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for spec, presumed in zip(inputs, self.presumed.inputs, strict=True):
            for symbol, name in zip(spec.shape, presumed.shape, strict=True):
                if isinstance(symbol, str) and isinstance(name, str) and BATCH not in (symbol, name):
                    other = first.setdefault(name, symbol)
                    found |= {symbol: other} if other != symbol else {}
        return found


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of input number `index`."""

    index: int


class TensorModule(torch.nn.Module):
    """`module` with flat tensors in and out: the form that every exporter is given."""

    def __init__(self, module: torch.nn.Module, calling: Calling) -> None:
        super().__init__()
        self.module = module
        self.calling = calling

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.calling.call(self.module, tensors)


def learn(
    module: torch.nn.Module, inputs: Any, *, others: Sequence[Any] = (), dynamic_shapes: Mapping[str, Any] | None = None
) -> Calling:
    """Learns the calling convention of `module` by calling it once with `inputs`, a small batch.

    `inputs` is a tensor, a tuple or list of them (positional arguments) or a dict (keyword arguments). `others` are
    further batches: a dimension in which they differ is free, as is what `dynamic_shapes` declares.
    Raises CaptureError, with the user's line, when a bundle cannot hold an input or output, or the call fails.
    """
    try:
        return _learn(module, inputs, others, dynamic_shapes)
    except CaptureError as error:
        place = code_paths.users_line(error.__cause__) if error.__cause__ else None
        place = place or code_paths.forward_of(users_own(module))
        if place is None:
            raise
        raise CaptureError(f"{error.message}; see {place}", hint=error.hint) from error


def _learn(
    module: torch.nn.Module, inputs: Any, others: Sequence[Any], dynamic_shapes: Mapping[str, Any] | None
) -> Calling:
    batches = [_flatten(module, one) for one in (inputs, *others)]
    first = batches[0]
    for number, other in enumerate(batches[1:], 2):
        _check_alike(first, other, number)
    declared = dynamic_dims.read_declared(first.specs, dynamic_shapes or {})
    tensors = [one.tensors for one in batches]
    led, counts = dynamic_dims.find_batch_axes(
        first.specs, tensors, declared[0], lambda given: _accepts(module, first, given)
    )
    follows, grows = set(), {}  # where a state counts the records of the batch, and where it grows, from what size
    if isinstance(module, Explicit):
        follows = {(GIVEN + name, axis) for name, axis in module.records.items()}
        initial = module.initial
        grows = {(GIVEN + name, axis): initial[GIVEN + name].shape[axis] for name, axis in module.grows.items()}
    free = dynamic_dims.find_free(first.specs, tensors, declared, leads=led, follows=follows, grows=grows)
    at = _largest(free, batches)
    base = batches[at]
    leads = free.leads
    alone = {place: BATCH if place in leads else f"{place[0]}.{place[1]}" for place in free.places}
    specs = _symbolic(base.specs, alone)
    answer = _call_example(module, (inputs, *others)[at])
    places = OutputPlaces.learn(answer)
    outputs = _outputs(module, answer, specs, counts[at], free)
    kinds = {place: (place in leads or place in follows, place in grows) for place in free.places}
    sizes = {place: (*kinds[place], *(_size(one, place) for one in batches)) for place in free.places}
    groups = free.group(sizes)
    named = zip(groups, free.name_groups(groups), strict=True)
    tied = _symbolic(base.specs, {place: name for group, name in named for place in group})
    least = {symbol: free.grows[place] for place, symbol in alone.items() if place in free.grows}
    return Calling(
        signature=_signature(specs, outputs, least),
        presumed=_signature(tied, outputs, least),
        example=tuple(base.tensors),
        free=free,
        leaves=tuple(base.leaves),
        spec=base.spec,
        batches=tuple(tuple(one.tensors) for one in batches),
        outputs=places,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flattened:
    """One batch of examples as a flat list."""

    specs: list[TensorSpec]
    tensors: list[torch.Tensor]
    leaves: list[Any]
    spec: Any


def _flatten(module: torch.nn.Module, inputs: Any) -> _Flattened:
    arguments = as_arguments(inputs)
    paths, spec = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
    names = _input_names(users_own(module), [path for path, _ in paths])
    states = {GIVEN + name for name in module.names} if isinstance(module, Explicit) else set()
    flat = _Flattened(specs=[], tensors=[], leaves=[], spec=spec)
    for (_, leaf), name in zip(paths, names, strict=True):
        if isinstance(leaf, torch.Tensor):
            flat.leaves.append(Slot(len(flat.tensors)))
            flat.tensors.append(leaf.detach())
            tensor_spec = _spec("input", name, leaf, None)
            flat.specs.append(msgspec.structs.replace(tensor_spec, role="state") if name in states else tensor_spec)
        else:
            flat.leaves.append(leaf)
    return flat


def _check_alike(first: _Flattened, other: _Flattened, number: int) -> None:
    want, have = ([(spec.name, spec.datatype, len(spec.shape)) for spec in one.specs] for one in (first, other))
    if first.spec != other.spec or want != have:
        raise CaptureError(
            f"example {number} has the inputs {have} (name, datatype, dimensions), the first has {want}",
            hint="all examples are called alike; only sizes and values may differ",
        )
    fixed = [leaf for leaf in other.leaves if not isinstance(leaf, Slot)]
    if fixed != [leaf for leaf in first.leaves if not isinstance(leaf, Slot)]:
        raise CaptureError(
            f"example {number} is called with {fixed} beside its tensors, the first with other values",
            hint="what is no tensor is part of the program: capture a bundle for each value",
        )


def _size(batch: _Flattened, place: Place) -> int:
    name, axis = place
    return next(t.shape[axis] for s, t in zip(batch.specs, batch.tensors, strict=True) if s.name == name)


def _accepts(module: torch.nn.Module, batch: _Flattened, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the model can be called as for `batch`, with `tensors`. One whose state is explicit is not called."""
    if isinstance(module, Explicit):
        return True
    leaves = [tensors[leaf.index].clone() if isinstance(leaf, Slot) else leaf for leaf in batch.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, batch.spec)
    try:
        with torch.no_grad(), as_trained(), preserve_buffers(module):
            module(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the user's forward at sizes it may not accept may raise anything
        return False
    return True


def _largest(free: Free, batches: Sequence[_Flattened]) -> int:
    """The first batch with no free dimension of size 1 but the batch itself, which a tracer takes for a constant."""
    others = [place for place in free.places if place not in free.leads]
    least = [min((_size(one, place) for place in others), default=2) for one in batches]
    return max(range(len(batches)), key=lambda i: min(least[i], 2))


def _symbolic(specs: Sequence[TensorSpec], symbols: Mapping[Place, str]) -> list[TensorSpec]:
    """`specs` with the symbols in their places."""
    shapes = [tuple(symbols.get((s.name, axis), size) for axis, size in enumerate(s.shape)) for s in specs]
    return [msgspec.structs.replace(spec, shape=shape) for spec, shape in zip(specs, shapes, strict=True)]


def _signature(specs: Sequence[TensorSpec], outputs: tuple[TensorSpec, ...], least: Mapping[str, int]) -> Signature:
    symbols = dict.fromkeys(size for spec in (*specs, *outputs) for size in spec.shape if isinstance(size, str))
    dims = {symbol: Dim(min=least.get(symbol, 1)) for symbol in symbols}
    return Signature(inputs=tuple(specs), outputs=outputs, dims=dims)


_ELSEWHERE = "the model may want a device that is not here: capture runs on the CPU; make tensors on x.device"
_CALLED_WITH = "forward is called with what examples() returns, or the inputs of the records"


def _call_example(module: torch.nn.Module, inputs: Any) -> Any:
    arguments = as_arguments(inputs)
    try:
        with torch.no_grad(), as_trained():
            outputs = module(*arguments.args, **arguments.kwargs)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be called with its own example: {type(error).__name__}: {error}",
            hint=_ELSEWHERE if any(word in str(error) for word in ("CUDA", "cuda", "device")) else _CALLED_WITH,
        ) from error
    return outputs


def _input_names(module: torch.nn.Module, paths: Sequence[Sequence[Any]]) -> list[str]:
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "input")
    names = []
    for path in paths:
        first, *deeper = [name_step(step) for step in path[1:]]
        if name_step(path[0]) == "0":
            index = int(first)
            first = positional[index].name if index < len(positional) else f"{rest}.{index - len(positional)}"
        names.append(".".join([first, *deeper]))
    return _unique(names, set())


def _unique(names: Iterable[str], taken: set[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "value"
        count, free = 2, plain
        while free in taken:
            free, count = f"{plain}_{count}", count + 1
        taken.add(free)
        unique.append(free)
    return unique


def _outputs(
    module: torch.nn.Module, answer: Any, inputs: Sequence[TensorSpec], num_records: int, free: Free
) -> tuple[TensorSpec, ...]:
    """The outputs by name. Those of an Explicit end with the state, in the form of its inputs, but for what grows."""
    answer, state = answer if isinstance(module, Explicit) else (answer, {})
    named = []
    for path, leaf in pytree.tree_flatten_with_path(answer)[0]:
        if leaf is None:
            continue
        named.append((name_output(path), leaf))
    if not named:
        raise CaptureError("the model returns no tensor; forward has to return a tensor, a tuple or a dict of them")
    names = _unique((name for name, _ in named), {spec.name for spec in inputs} | set(state))
    outputs = [_spec("output", name, leaf, num_records) for name, (_, leaf) in zip(names, named, strict=True)]
    specs = {spec.name: spec for spec in inputs}
    for name in state:
        given = specs[GIVEN + name.removeprefix(NEXT)]
        own = {axis: f"{name}.{axis}" for axis in range(len(given.shape)) if (given.name, axis) in free.grows}
        shape = tuple(own.get(axis, size) for axis, size in enumerate(given.shape))
        outputs.append(msgspec.structs.replace(given, name=name, shape=shape))
    return tuple(outputs)


_DENSE = "make it a dense tensor inside the model: .to_dense()"
_AS_DENSE = {
    "nested": "fill it up inside the model: torch.nested.to_padded_tensor(y, 0.0)",
    "quantized": "make numbers of it inside the model: .dequantize()",
}
_AS_REAL = {
    "input": "take the real and the imaginary part in a last dimension of 2, and join them: torch.view_as_complex(x)",
    "output": "return torch.view_as_real(y): the real and the imaginary part in a last dimension of 2",
}


def _spec(role: str, name: str, leaf: Any, num_records: int | None) -> TensorSpec:
    if not isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"{role} '{name}' of the model is {name_type(leaf)}, not a tensor",
            hint="make a tensor of the number, as torch.tensor([n]), or leave it out"
            if isinstance(leaf, int | float)
            else "return tensors, or tuples and dicts of them",
        )
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout)
        raise CaptureError(f"{role} '{name}' is {kind}, which no bundle can carry", hint=_AS_DENSE.get(kind, _DENSE))
    if leaf.is_complex():
        raise CaptureError(f"{role} '{name}' is complex ({leaf.dtype}), which no bundle can carry", hint=_AS_REAL[role])
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

"""The sizes of outputs, where no exporter derives them: what the probes showed.

A size is a number when it never changed, the symbol of an input when it always was that symbol's size, and
else a symbol of its own without a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from trueline.bundle.signature import DATATYPES, Dim, Signature, TensorSpec
from trueline.errors import CaptureError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.capture.proof.prove import Observation

Seen = Sequence[tuple[Mapping[str, int], tuple[int, ...]]]
"""For each probe the sizes of the input symbols, and the shape of one output."""


def seen_signature(inputs: Signature, observations: Sequence[Observation]) -> Signature:
    """`inputs` with the outputs as the probes showed them. Raises CaptureError when an output has no one form."""
    answered = [(seen.probe.inputs, seen.outputs) for seen in observations if seen.outputs is not None]
    if not answered:
        why = next((seen.error for seen in observations), "there is no probe")
        raise CaptureError(f"the model answers no probe: {why}")
    states = {spec.name for spec in inputs.outputs if spec.role == "state"}
    dims, outputs = dict(inputs.dims), []
    for name, first in answered[0][1].items():
        shapes = [(inputs.sizes(given), found[name].shape) for given, found in answered if name in found]
        if len(shapes) != len(answered) or len({len(shape) for _, shape in shapes}) != 1:
            raise CaptureError(
                f"output '{name}' is not always there, or not always of {first.ndim} dimensions",
                hint="a bundle has the same outputs for every request",
            )
        role: Literal["data", "state"] = "state" if name in states else "data"
        outputs.append(msgspec.structs.replace(_spec(name, first, shapes, dims), role=role))
    return Signature(inputs=inputs.inputs, outputs=tuple(outputs), dims=dims, guards=inputs.guards)


def _spec(name: str, first: Array, shapes: Seen, dims: dict[str, Dim]) -> TensorSpec:
    shape: list[int | str] = []
    for axis, size in enumerate(first.shape):
        found = [(symbols, other[axis]) for symbols, other in shapes]
        same = next((symbol for symbol in found[0][0] if all(at[symbol] == other for at, other in found)), None)
        if all(other == size for _, other in found) and len(found) > 1:
            shape.append(size)
        elif same is not None:
            shape.append(same)
        else:
            dims[f"{name}.{axis}"] = Dim(min=0)
            shape.append(f"{name}.{axis}")
    return TensorSpec(name=name, datatype=DATATYPES[first.dtype], shape=tuple(shape))

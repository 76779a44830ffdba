"""Golden records: a few batches with the eager model's answers, as safetensors in the bundle.

A case is one batch; its tensors are stored as "case/name", so that one file holds batches of several sizes. The server
replays them before a version is ready. How far a float output may be off is stored beside it, as the proof found it: a
bound for the whole ("case/name/0"), and one for each index of each axis ("case/name/1" and on; see `runtime.compare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from trueline.errors import BundleError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One batch and the eager model's answer."""

    case: str
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    bounds: dict[str, tuple[Floats, ...]] = field(default_factory=dict)
    """By output; empty in bundles that were sealed without, whose answers are compared by the tolerance of the
    dtype."""


def encode(cases: Sequence[Golden]) -> tuple[bytes, bytes, bytes]:
    """The three files: inputs, outputs, bounds."""
    bounds = {
        golden.case: {f"{name}/{at}": one for name, bound in golden.bounds.items() for at, one in enumerate(bound)}
        for golden in cases
    }
    inputs, outputs = ({golden.case: getattr(golden, side) for golden in cases} for side in ("inputs", "outputs"))
    return _encode(inputs), _encode(outputs), _encode(bounds)


def _encode(cases: Mapping[str, Mapping[str, Array]]) -> bytes:
    named = {
        f"{case}/{name}": np.ascontiguousarray(array).reshape(array.shape)
        for case, tensors in cases.items()
        for name, array in tensors.items()
    }
    return safetensors.numpy.save(named)


def decode(
    cases: Sequence[str], inputs: bytes, outputs: bytes, where: str, bounds: bytes | None = None
) -> tuple[Golden, ...]:
    """The cases in order. Raises BundleError that names `where` if the files do not hold them."""
    try:
        given, answered = safetensors.numpy.load(inputs), safetensors.numpy.load(outputs)
        allowed = safetensors.numpy.load(bounds) if bounds is not None else {}
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"golden records of {where} cannot be read: {error}") from error
    found = tuple(
        Golden(case=case, inputs=_select(case, given), outputs=_select(case, answered), bounds=_bounds(case, allowed))
        for case in cases
    )
    for golden in found:
        if not golden.inputs or not golden.outputs:
            raise BundleError(f"golden records of {where} lack case '{golden.case}'")
        for name, bound in golden.bounds.items():
            shape = golden.outputs[name].shape if name in golden.outputs else None
            if shape is None or [one.shape for one in bound] != [(1,), *((size,) for size in shape)]:
                raise BundleError(
                    f"golden records of {where}: the bounds of '{golden.case}/{name}' do not fit its shape"
                )
    return found


def _bounds(case: str, tensors: Mapping[str, Array]) -> dict[str, tuple[Floats, ...]]:
    parts: dict[str, dict[int, Floats]] = {}
    for key, array in _select(case, tensors).items():
        name, _, at = key.rpartition("/")
        parts.setdefault(name, {})[int(at) if at.isdecimal() else -1] = array.astype(np.float64)
    return {name: tuple(found[at] for at in sorted(found)) for name, found in parts.items()}


def _select(case: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    prefix = case + "/"
    return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}

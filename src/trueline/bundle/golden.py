"""Golden records: a few batches with the eager model's answers, as safetensors in the bundle.

A case is one batch; its tensors are stored as "case/name", so that one file holds batches of several sizes. The server
replays them before a version is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import safetensors.numpy

from trueline.errors import BundleError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One batch and the eager model's answer."""

    case: str
    inputs: dict[str, Array]
    outputs: dict[str, Array]


def encode(cases: Sequence[Golden]) -> tuple[bytes, bytes]:
    """The two files: inputs, outputs."""
    inputs = {golden.case: golden.inputs for golden in cases}
    return _encode(inputs), _encode({golden.case: golden.outputs for golden in cases})


def _encode(cases: Mapping[str, Mapping[str, Array]]) -> bytes:
    named = {
        f"{case}/{name}": np.ascontiguousarray(array).reshape(array.shape)
        for case, tensors in cases.items()
        for name, array in tensors.items()
    }
    return safetensors.numpy.save(named)


def decode(cases: Sequence[str], inputs: bytes, outputs: bytes, where: str) -> tuple[Golden, ...]:
    """The cases in order. Raises BundleError that names `where` if the files do not hold them."""
    try:
        given, answered = safetensors.numpy.load(inputs), safetensors.numpy.load(outputs)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"golden records of {where} cannot be read: {error}") from error
    found = tuple(Golden(case=case, inputs=_select(case, given), outputs=_select(case, answered)) for case in cases)
    for golden in found:
        if not golden.inputs or not golden.outputs:
            raise BundleError(f"golden records of {where} lack case '{golden.case}'")
    return found


def _select(case: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    prefix = case + "/"
    return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}

"""Golden examples: a few batches with the answers of the eager model, carried by the bundle as
safetensors.

A case is one batch; its tensors are stored as "case/name", so that batches of several sizes lie in one
file. The server replays them before a version is ready. No torch, no pickle.
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
    """One batch: what went in and what the eager model answered."""

    case: str
    inputs: dict[str, Array]
    outputs: dict[str, Array]


def encode(cases: Sequence[Golden]) -> tuple[bytes, bytes]:
    """The two files: inputs, outputs."""
    return (
        _encode({golden.case: golden.inputs for golden in cases}),
        _encode({golden.case: golden.outputs for golden in cases}),
    )


def _encode(cases: Mapping[str, Mapping[str, Array]]) -> bytes:
    named = {
        f"{case}/{name}": np.ascontiguousarray(array).reshape(array.shape)
        for case, tensors in cases.items()
        for name, array in tensors.items()
    }
    return safetensors.numpy.save(named)


def decode(cases: Sequence[str], inputs: bytes, outputs: bytes, where: str) -> tuple[Golden, ...]:
    """The cases in their order. Raises BundleError that names `where` when the files do not hold them."""
    try:
        given, answered = safetensors.numpy.load(inputs), safetensors.numpy.load(outputs)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"golden examples of {where} cannot be read: {error}") from error
    found = []
    for case in cases:
        golden = Golden(case=case, inputs=_of(case, given), outputs=_of(case, answered))
        if not golden.inputs or not golden.outputs:
            raise BundleError(f"golden examples of {where} lack case '{case}'")
        found.append(golden)
    return tuple(found)


def _of(case: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    prefix = case + "/"
    return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}

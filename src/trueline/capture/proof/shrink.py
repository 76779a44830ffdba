"""The smallest input that shows a disagreement: sizes towards 1, values towards zeros, greedily.

What remains is what the user has to look at: `x FP32 [1, 3] = [[0, 0, 1]]` says more than a batch of 32. Each step is
one question to the eager model and one to the program, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import DATATYPES
from trueline.capture.proof.observe import care
from trueline.capture.proof.probes import Probe, fitting, resize
from trueline.capture.proof.prove import disagreement
from trueline.errors import TruelineError
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

QUESTIONS = 60
SHOWN = 16
"""Elements of an input that are written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """An input as small as it could be made, on which program and model still disagree."""

    inputs: Mapping[str, Array]
    reason: str

    def __str__(self) -> str:
        return "; ".join(_shown(name, array) for name, array in self.inputs.items())


def shrink(program: Session, eager: Session, probe: Probe, *, questions: int = QUESTIONS) -> Shrunk | None:
    """Shrinks `probe`; None when the two agree on it (a disagreement that does not come back)."""
    asked = 0

    def differs(inputs: Mapping[str, Array]) -> str:
        nonlocal asked
        asked += 1
        if asked > questions:
            return ""
        try:
            program.signature.check(inputs)
            with care(probe):
                expected = eager.run(inputs)
        except (TruelineError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return ""  # outside the claim, or nothing that the model itself can answer
        return disagreement(program, replace(probe, inputs=inputs), expected)

    reason = differs(probe.inputs)
    if not reason:
        return None
    found = Shrunk(inputs=probe.inputs, reason=reason)
    for step in (_smaller, _simpler):
        found = _descend(found, step, program, differs)
    return found


Step = Callable[[Session, Mapping[str, "Array"]], Iterator[Mapping[str, "Array"]]]


def _descend(found: Shrunk, step: Step, program: Session, differs: Callable[[Mapping[str, Array]], str]) -> Shrunk:
    """Takes the first candidate that still differs, until none does."""
    while True:
        for candidate in step(program, found.inputs):
            reason = differs(candidate)
            if reason:
                found = Shrunk(inputs=candidate, reason=reason)
                break
        else:
            return found


def _smaller(program: Session, inputs: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    signature = program.signature
    base = signature.sizes(inputs)
    for symbol, size in base.items():
        step = signature.dims[symbol].multiple_of
        for wanted in sorted({step, 2 * step, 3 * step, size // 2 // step * step, size - step}):
            sizes = fitting(signature, base, {symbol: wanted}) if 0 < wanted < size else None
            if sizes is not None and all(sizes[other] <= base[other] for other in base):
                yield resize(inputs, signature, sizes)


def _simpler(program: Session, inputs: Mapping[str, Array]) -> Iterator[Mapping[str, Array]]:
    for name, array in inputs.items():
        for candidate in _plainer(array):
            if not np.array_equal(candidate, array, equal_nan=array.dtype.kind == "f"):
                yield {**inputs, name: candidate}


def _plainer(array: Array) -> Iterator[Array]:
    """Simpler values: all alike, whole numbers, one half like the smallest. Integers stay inside what is there."""
    if not array.size:
        return
    if array.dtype.kind != "f":
        yield np.full_like(array, array.min())
        return
    yield np.zeros_like(array)
    if np.all(array == array.reshape(-1)[0]):
        return
    yield np.ones_like(array)
    flat = array.reshape(-1)
    kept = np.flatnonzero(flat)
    for part in (kept[: len(kept) // 2], kept[len(kept) // 2 :]) if len(kept) > 1 else ():
        fewer = flat.copy()
        fewer[part] = 0
        yield fewer.reshape(array.shape)
    yield np.asarray(np.sign(array) * np.ceil(np.abs(array)))


def _shown(name: str, array: Array) -> str:
    head = f"{name} {DATATYPES[array.dtype]} {list(array.shape)}"
    if array.size <= SHOWN:
        return f"{head} = {np.array2string(array, separator=', ', max_line_width=10_000, precision=4)}"
    return f"{head} from {array.min():.4g} to {array.max():.4g}"

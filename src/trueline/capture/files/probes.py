"""Probes for a program that comes without a model: made from its signature alone.

Floats are normal, and then zeros, ones, extremes; integers are 0 and 1, which lie inside every table of
ids and are what a mask holds. Equal arguments give equal probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import Signature
from trueline.capture.proof.probes import Probe

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

BATCH = "batch"
BATCHES = (5, 1, 2, 3, 8, 17)
OTHERS = (8, 1, 2, 3, 5, 13, 16)
"""Sizes of the other free dimensions; the first is the one at which values are varied."""


def make(signature: Signature, *, seed: int = 0) -> tuple[Probe, ...]:
    """Probes inside the range that `signature` claims; the first comes again, last."""
    random = np.random.default_rng(seed)
    base = fitted(signature, {BATCH: BATCHES[0]}, OTHERS[0])
    found = [_probe("as made", signature, base, random)]
    found += _sized(signature, base, random)
    found += _valued(signature, found[0].inputs, base)
    last = found[0]
    return (*found, Probe(name=f"{last.name}, again", origin="made", num_records=last.num_records, inputs=last.inputs))


def fitted(signature: Signature, wanted: Mapping[str, int], other: int) -> dict[str, int]:
    """A size for every symbol of the inputs: `wanted`, else `other`, moved into its range."""
    symbols = dict.fromkeys(size for spec in signature.inputs for size in spec.shape if isinstance(size, str))
    found = {}
    for symbol in symbols:
        dim = signature.dims[symbol]
        size = max(wanted.get(symbol, other), dim.min)
        size += -size % dim.multiple_of
        found[symbol] = size if dim.max is None else min(size, dim.max - dim.max % dim.multiple_of)
    return found


def made(signature: Signature, sizes: Mapping[str, int], random: np.random.Generator) -> dict[str, Array]:
    """One request of these sizes."""
    found: dict[str, Array] = {}
    for spec in signature.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        if spec.dtype.kind == "f":
            found[spec.name] = np.asarray(random.standard_normal(shape)).astype(spec.dtype)
        else:
            found[spec.name] = np.asarray(random.integers(0, 2, shape)).astype(spec.dtype)
    return found


def _probe(what: str, signature: Signature, sizes: Mapping[str, int], random: np.random.Generator) -> Probe:
    told = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items()) or "fixed sizes"
    return Probe(
        name=f"{told}, {what}", origin="made", num_records=_records(sizes), inputs=made(signature, sizes, random)
    )


def _records(sizes: Mapping[str, int]) -> int:
    return sizes.get(BATCH, 1)


def _sized(signature: Signature, base: Mapping[str, int], random: np.random.Generator) -> Iterator[Probe]:
    wanted = [fitted(signature, {BATCH: batch}, OTHERS[0]) for batch in BATCHES]
    wanted += [fitted(signature, {BATCH: 2}, other) for other in OTHERS]
    for symbol in base:
        dim = signature.dims[symbol]
        wanted += [fitted(signature, {**base, symbol: end}, OTHERS[0]) for end in (dim.min, dim.max, 11) if end]
    seen = [dict(base)]
    for sizes in wanted:
        if sizes not in seen and max(sizes.values(), default=0) <= 4096:
            seen.append(sizes)
            yield _probe("random", signature, sizes, random)


def _valued(signature: Signature, inputs: Mapping[str, Array], base: Mapping[str, int]) -> Iterator[Probe]:
    changes: dict[str, Callable[[Array], Array]] = {
        "zeros": lambda array: np.zeros_like(array),
        "ones": lambda array: np.ones_like(array),
        "negated": lambda array: np.negative(array) if array.dtype.kind == "f" else array,
        "times 1000": lambda array: array * np.asarray(1000, array.dtype) if array.dtype.kind == "f" else array,
        "times 0.001": lambda array: array * np.asarray(0.001, array.dtype) if array.dtype.kind == "f" else array,
    }
    for what, change in changes.items():
        changed = {name: change(array) for name, array in inputs.items()}
        yield Probe(name=f"as made, {what}", origin="made", num_records=_records(base), inputs=changed)

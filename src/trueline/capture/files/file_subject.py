"""A program file as a subject of proof: its claim, its oracle, and probes made from its signature alone.

Floats are normal, then zeros, ones and extremes. Integers are 0 and 1, which are in every table of ids and mask.
Equal arguments give equal probes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from trueline.bundle.signature import Array, Dim, Signature, TensorSpec
from trueline.capture.proof.observe import Observation, observe
from trueline.capture.proof.probes import BATCH, Probe
from trueline.runtime.session import Format, Session

Kind = Literal["onnx", "torch_export", "torchscript"]
BATCHES = (5, 1, 2, 3, 8, 17)
OTHERS = (8, 1, 2, 3, 5, 13, 16)
"""Sizes of the other free dimensions; values are varied at the first."""
LARGEST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSubject:
    """What the file claims, the session that answers for it, and how each format is made of it."""

    kind: Kind
    signature: Signature
    oracle: Session
    against: str
    """The oracle by name and version, for the evidence."""
    observations: tuple[Observation, ...]
    emit: dict[Format, Callable[[Path], Path]]


def plain_name(text: str) -> str:
    """`text` as the name of a bundle."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text) or "model"


def claim(specs: Iterable[TensorSpec]) -> Signature:
    """Inputs with every symbol unbounded; the outputs are left to what the probes show."""
    inputs = tuple(specs)
    symbols = dict.fromkeys(size for spec in inputs for size in spec.shape if isinstance(size, str))
    return Signature(inputs=inputs, outputs=(), dims={symbol: Dim() for symbol in symbols})


def observe_file(oracle: Session, probes: Sequence[Probe]) -> tuple[Observation, ...]:
    """The answers of the file. A size that it claims and cannot answer counts against it, though the probe is made."""
    return tuple(
        replace(seen, probe=replace(seen.probe, origin="given")) if seen.outputs is None else seen
        for seen in observe(oracle, probes)
    )


def make_file_probes(signature: Signature, *, seed: int = 0) -> tuple[Probe, ...]:
    """Probes inside the range that `signature` claims; the first is repeated at the end."""
    random = np.random.default_rng(seed)
    base = fit_sizes(signature, {BATCH: BATCHES[0]}, OTHERS[0])
    first = _probe("as made", signature, base, random)
    again = replace(first, name=f"{first.name}, again")
    return (first, *_sized_probes(signature, base, random), *_valued_probes(first), again)


def fit_sizes(signature: Signature, wanted: Mapping[str, int], other: int) -> dict[str, int]:
    """A size for every symbol of the inputs: `wanted`, else `other`, moved into its range."""
    sizes = {}
    for symbol in dict.fromkeys(size for spec in signature.inputs for size in spec.shape if isinstance(size, str)):
        dim = signature.dims[symbol]
        size = max(wanted.get(symbol, other), dim.min)
        size += -size % dim.multiple_of
        sizes[symbol] = size if dim.max is None else min(size, dim.max - dim.max % dim.multiple_of)
    return sizes


def random_inputs(signature: Signature, sizes: Mapping[str, int], random: np.random.Generator) -> dict[str, Array]:
    """One request of these sizes."""
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        values = random.standard_normal(shape) if spec.dtype.kind == "f" else random.integers(0, 2, shape)
        inputs[spec.name] = np.asarray(values).astype(spec.dtype)
    return inputs


def _probe(what: str, signature: Signature, sizes: Mapping[str, int], random: np.random.Generator) -> Probe:
    named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items()) or "fixed sizes"
    inputs = random_inputs(signature, sizes, random)
    return Probe(name=f"{named}, {what}", origin="made", num_records=sizes.get(BATCH, 1), inputs=inputs)


def _sized_probes(signature: Signature, base: Mapping[str, int], random: np.random.Generator) -> Iterator[Probe]:
    wanted = [fit_sizes(signature, {BATCH: batch}, OTHERS[0]) for batch in BATCHES]
    wanted += [fit_sizes(signature, {BATCH: 2}, other) for other in OTHERS]
    for symbol in base:
        dim = signature.dims[symbol]
        wanted += [fit_sizes(signature, {**base, symbol: end}, OTHERS[0]) for end in (dim.min, dim.max, 11) if end]
    seen = [dict(base)]
    for sizes in wanted:
        if sizes not in seen and max(sizes.values(), default=0) <= LARGEST:
            seen.append(sizes)
            yield _probe("random", signature, sizes, random)


def _valued_probes(first: Probe) -> Iterator[Probe]:
    def of_floats(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda array: change(array) if array.dtype.kind == "f" else array

    changes: dict[str, Callable[[Array], Array]] = {
        "zeros": np.zeros_like,
        "ones": np.ones_like,
        "negated": of_floats(np.negative),
        "times 1000": of_floats(lambda array: array * np.asarray(1000, array.dtype)),
        "times 0.001": of_floats(lambda array: array * np.asarray(0.001, array.dtype)),
    }
    for what, change in changes.items():
        yield replace(
            first, name=f"as made, {what}", inputs={name: change(array) for name, array in first.inputs.items()}
        )

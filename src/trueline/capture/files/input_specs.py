"""Inputs as somebody declares them who comes with a file that does not say its own: `x=FP32[batch,3,size]`.

A letter or word in place of a number is a free size; `ids=INT64[batch,length]<1000` says that the integers lie below
1000. In place of a declaration stands a file of examples, .npz or .safetensors, one batch by name; a second file
shows by its sizes what is free. Equal declarations give equal examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.capture.files.file_subject import claim
from trueline.capture.proof.probes import BATCH
from trueline.errors import UsageError, join_names

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_FORM = re.compile(r"(?P<name>[\w.-]+)=(?P<datatype>[A-Za-z]+\d*)\[(?P<sizes>[\w\s,]*)\](<(?P<below>\d+))?")
_FILES = (".npz", ".safetensors")
_SIZES = (7, 11, 13, 17, 19)
"""Of free dimensions but the batch: primes, seldom equal to another size of the model by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a program takes, and batches of it. The outputs of `signature` are left to what the program shows."""

    signature: Signature
    examples: tuple[Mapping[str, Array], ...]

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, str]]:
        """The free sizes but the batch, as torch.export declares them."""
        return {
            spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str) and size != BATCH}
            for spec in self.signature.inputs
        }


def declared(given: Sequence[str]) -> Declared:
    """What `given` says, declarations or files of examples. Raises UsageError.

    >>> declared(["x=FP32[batch,3]", "ids=INT64[batch,n]<9"]).signature.inputs[1].shape
    ('batch', 'n')
    """
    files = [Path(one) for one in given if one.lower().endswith(_FILES) and "[" not in one]
    if files and len(files) < len(given):
        raise UsageError(
            f"--example names files ({join_names(map(str, files))}) and declares inputs; do one of the two"
        )
    return _shown([_read(path) for path in files], files) if files else _made([_parsed(one) for one in given])


@dataclass(frozen=True, slots=True, kw_only=True)
class _One:
    spec: TensorSpec
    below: int


def _parsed(text: str) -> _One:
    found = _FORM.fullmatch(text)
    datatype = found["datatype"].upper() if found else ""
    if found is None or datatype not in NUMPY_DTYPES:
        raise UsageError(
            f"--example '{text}' is no declaration of an input (datatypes: {join_names(NUMPY_DTYPES)})",
            hint="write NAME=FP32[batch,3,size], NAME=INT64[batch,length]<1000, or name an .npz or .safetensors file",
        )
    sizes = [size.strip() for size in found["sizes"].split(",") if size.strip()]
    shape = tuple(int(size) if size.isdecimal() else size for size in sizes)
    if 0 in shape:
        raise UsageError(f"--example '{text}' has a size of 0")
    spec = TensorSpec(name=found["name"], datatype=datatype, shape=shape)
    return _One(spec=spec, below=int(found["below"] or 2))


def _made(ones: Sequence[_One]) -> Declared:
    names = [one.spec.name for one in ones]
    if len(set(names)) != len(names):
        raise UsageError(f"--example declares an input twice ({join_names(names)})")
    signature = claim(one.spec for one in ones)
    others = [symbol for symbol in signature.dims if symbol != BATCH]
    random = np.random.default_rng(0)
    examples = []
    for batch, shift in ((5, 0), (3, 1)):
        sizes = {symbol: _SIZES[(at + shift) % len(_SIZES)] for at, symbol in enumerate(others)} | {BATCH: batch}
        examples.append({one.spec.name: _values(one, sizes, random) for one in ones})
    return Declared(signature=signature, examples=tuple(examples))


def _values(one: _One, sizes: Mapping[str, int], random: np.random.Generator) -> Array:
    shape = [sizes[size] if isinstance(size, str) else size for size in one.spec.shape]
    if one.spec.dtype.kind == "f":
        return np.asarray(random.standard_normal(shape)).astype(one.spec.dtype)
    return np.asarray(random.integers(0, one.below, shape)).astype(one.spec.dtype)


def _read(path: Path) -> dict[str, Array]:
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
        else:
            from safetensors.numpy import load_file

            found = load_file(path)
    except Exception as error:
        raise UsageError(f"{path} is no file of examples that can be read: {error}") from error
    strange = [name for name, array in found.items() if array.dtype not in DATATYPES or not array.ndim]
    if strange or not found:
        raise UsageError(
            f"{path} has to hold a batch of numbers for every input; that is not so of: {join_names(strange)}"
        )
    return found


def _shown(batches: Sequence[Mapping[str, Array]], paths: Sequence[Path]) -> Declared:
    """Files of examples: the batch is free, and every dimension in which they differ."""
    first = batches[0]
    for batch, path in zip(batches, paths, strict=True):
        if {n: (a.ndim, a.dtype) for n, a in batch.items()} != {n: (a.ndim, a.dtype) for n, a in first.items()}:
            raise UsageError(
                f"{path} holds other inputs than {paths[0]}: {join_names(batch)}; sizes and values may differ"
            )
    alike = all(len({len(array) for array in batch.values()}) == 1 for batch in batches)
    specs = []
    for name, array in first.items():
        shape: list[int | str] = list(array.shape)
        for axis in range(array.ndim):
            if len({one[name].shape[axis] for one in batches}) > 1:
                shape[axis] = f"{name}.{axis}"
        if alike:
            shape[0] = BATCH
        specs.append(TensorSpec(name=name, datatype=DATATYPES[array.dtype], shape=tuple(shape)))
    return Declared(signature=claim(specs), examples=tuple(batches))

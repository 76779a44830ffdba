"""Declarations of inputs, for a file without declarations of its own: `x=FP32[batch,3,size]`.

A letter or word in place of a number is a free size; the integers of `ids=INT64[batch,length]<1000` are below 1000.
Instead of declarations there may be files of examples, .npz or .safetensors, each one batch by name; sizes in which
they differ are free. Equal declarations give equal examples.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Array, Signature, TensorSpec
from trueline.capture.files.file_subject import claim
from trueline.capture.proof.probes import BATCH
from trueline.errors import UsageError, join_names

_FORM = re.compile(r"(?P<name>[\w.-]+)=(?P<datatype>[A-Za-z]+\d*)\[(?P<sizes>[\w\s,]*)\](<(?P<below>\d+))?")
_FILES = (".npz", ".safetensors")
_SIZES = (7, 11, 13, 17, 19)
"""Of free dimensions but the batch: primes, seldom equal to another size of the model by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredInputs:
    """A program's inputs, and batches of them. The outputs of `signature` are left to what the program shows."""

    signature: Signature
    examples: tuple[Mapping[str, Array], ...]

    @property
    def dynamic_shapes(self) -> dict[str, dict[int, str]]:
        """The free sizes but the batch, as torch.export declares them."""
        return {
            spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str) and size != BATCH}
            for spec in self.signature.inputs
        }


def read_declarations(given: Sequence[str]) -> DeclaredInputs:
    """Reads declarations, or files of examples. Raises UsageError.

    >>> read_declarations(["x=FP32[batch,3]", "ids=INT64[batch,n]<9"]).signature.inputs[1].shape
    ('batch', 'n')
    """
    files = [Path(one) for one in given if one.lower().endswith(_FILES) and "[" not in one]
    if files and len(files) < len(given):
        raise UsageError(
            f"--example names files ({join_names(map(str, files))}) and declares inputs; do one of the two"
        )
    if files:
        return _from_files([_read(path) for path in files], files)
    return _with_examples([_parse(one) for one in given])


def _parse(text: str) -> tuple[TensorSpec, int]:
    """The declared input, and the bound of its integers."""
    form = _FORM.fullmatch(text)
    datatype = form["datatype"].upper() if form else ""
    if form is None or datatype not in NUMPY_DTYPES:
        raise UsageError(
            f"--example '{text}' is no declaration of an input (datatypes: {join_names(NUMPY_DTYPES)})",
            hint="write NAME=FP32[batch,3,size], NAME=INT64[batch,length]<1000, or name an .npz or .safetensors file",
        )
    sizes = [size.strip() for size in form["sizes"].split(",") if size.strip()]
    shape = tuple(int(size) if size.isdecimal() else size for size in sizes)
    if 0 in shape:
        raise UsageError(f"--example '{text}' has a size of 0")
    spec = TensorSpec(name=form["name"], datatype=datatype, shape=shape)
    return spec, int(form["below"] or 2)


def _with_examples(declarations: Sequence[tuple[TensorSpec, int]]) -> DeclaredInputs:
    names = [spec.name for spec, _ in declarations]
    if len(set(names)) != len(names):
        raise UsageError(f"--example declares an input twice ({join_names(names)})")
    signature = claim(spec for spec, _ in declarations)
    others = [symbol for symbol in signature.dims if symbol != BATCH]
    random = np.random.default_rng(0)

    def values(spec: TensorSpec, below: int, sizes: Mapping[str, int]) -> Array:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        floats = spec.dtype.kind == "f"
        drawn = random.standard_normal(shape) if floats else random.integers(0, below, shape)
        return np.asarray(drawn).astype(spec.dtype)

    examples = []
    for batch, shift in ((5, 0), (3, 1)):
        sizes = {symbol: _SIZES[(at + shift) % len(_SIZES)] for at, symbol in enumerate(others)} | {BATCH: batch}
        examples.append({spec.name: values(spec, below, sizes) for spec, below in declarations})
    return DeclaredInputs(signature=signature, examples=tuple(examples))


def _read(path: Path) -> dict[str, Array]:
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        else:
            from safetensors.numpy import load_file

            arrays = load_file(path)
    except Exception as error:
        raise UsageError(f"{path} is no file of examples that can be read: {error}") from error
    strange = [name for name, array in arrays.items() if array.dtype not in DATATYPES or not array.ndim]
    if strange or not arrays:
        raise UsageError(
            f"{path} has to hold a batch of numbers for every input; that is not so of: {join_names(strange)}"
        )
    return arrays


def _from_files(batches: Sequence[Mapping[str, Array]], paths: Sequence[Path]) -> DeclaredInputs:
    """The batch is free, and every dimension in which the files differ."""
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
    return DeclaredInputs(signature=claim(specs), examples=tuple(batches))
